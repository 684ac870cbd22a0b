"""Costs of the layers of a model, one after the other, from a file or to one.

>>> layers = Layers.from_json('''{"format": "megatron_zbpp.layers/1", "layers": [
...     {"kind": "E", "F": 1, "W": 1}, {"kind": "t", "count": 2, "F": 2, "B": 2, "W": 2},
...     {"kind": "L", "F": 4, "B": 4, "W": 4}]}''')
>>> len(layers), layers.text((2, 2))
(4, 'Et|tL')
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, groupby, pairwise
from math import isfinite
from typing import Any

from megatron_zbpp.ir import strict_json

FORMAT = 'megatron_zbpp.layers/1'
_MOST = 100_000  # layers of an entry
KINDS = frozenset('EtmLM*+-GD')  # letters of layers in Megatron's layouts and patterns
EMBEDDING, DECODER, MTP, LOSS = 'E', 't', 'm', 'L'


@dataclass(frozen=True)
class Layer:
    """Costs of one layer for one microbatch. Units are the caller's, the same for all layers.

    Attributes:
        kind: a letter of the layout: E embedding, t decoder, m multi-token prediction, L output
            layer and loss; of a hybrid model, those of its pattern.
        forward: time of F.
        backward: time of B.
        weight: time of W.
        activation: held from the start of F.
        retained: held in its place from the end of B to the end of W; None: as much.
        parameters: memory of weights, gradients and optimizer states, in the unit of `activation`.
        output: what the layer sends on, in units of which `Devices.bandwidth` has some a time unit.
    """

    kind: str
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    activation: float = 1.0
    retained: float | None = None
    parameters: float = 0.0
    output: float = 0.0

    def __post_init__(self) -> None:
        letter = len(self.kind) == 1 and self.kind.isprintable() and self.kind not in '|,()* '
        if not (letter or self.kind == '*'):
            raise ValueError(f'layer kind {self.kind!r} is not a letter of a layout: E, t, m, L')
        if self.retained is None:
            object.__setattr__(self, 'retained', self.activation)
        for name in _AMOUNTS:
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f'{name} = {value} of a layer {self.kind}: give numbers from 0 up')

    @property
    def time(self) -> float:
        """Time of F, B and W together."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Layers:
    """The layers of a model in its order.

    Attributes:
        layers: one entry a layer.
    """

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, 'layers', tuple(self.layers))
        if not self.layers:
            raise ValueError('a model of no layers: give at least one')
        kinds = ''.join(layer.kind for layer in self.layers)
        for kind, at in ((EMBEDDING, 0), (LOSS, len(kinds) - 1)):
            if DECODER in kinds and (kinds.count(kind) > 1 or kinds.find(kind) not in (-1, at)):
                where = 'first' if kind == EMBEDDING else 'last'
                raise ValueError(f'layers {kinds}: give one {kind}, as the {where}')
        if len([kind for kind, _ in groupby(kinds) if kind == MTP]) > 1 or 'mt' in kinds:
            raise ValueError(f'layers {kinds}: put all m after the last t')

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @property
    def lightest(self) -> float:
        """Time of the lightest layer that takes any."""
        return min((layer.time for layer in self.layers if layer.time > 0), default=0.0)

    def sums(self, name: str) -> list[float]:
        """Return prefix sums of one attribute: entry i is of the first i layers."""
        return [0.0, *accumulate(getattr(layer, name) for layer in self.layers)]

    def stages(self, cuts: Sequence[int]) -> list[tuple[Layer, ...]]:
        """Return the layers of each stage, of so many layers each."""
        ends = [0, *accumulate(cuts)]
        return [self.layers[start:end] for start, end in pairwise(ends)]

    def text(self, cuts: Sequence[int]) -> str:
        """Return the layout of these stages, in the language of Megatron's own flag."""
        return '|'.join(''.join(layer.kind for layer in own) for own in self.stages(cuts))

    def splits(self) -> frozenset[int]:
        """Return how many layers may come before a cut; Megatron wants all m in one stage."""
        kinds = [layer.kind for layer in self.layers]
        return frozenset(at for at in range(1, len(kinds)) if not kinds[at - 1] == kinds[at] == MTP)

    def to_json(self) -> str:
        """Return one JSON object, layers that are alike and neighbours in one entry."""
        entries: list[str] = []
        for layer, run in groupby(self.layers):
            count = len(list(run))
            fields = asdict(layer)
            fields = {'kind': fields.pop('kind'), **({'count': count} if count > 1 else {})} | {
                _NAMES.get(name, name): value for name, value in fields.items()
            }
            entries.append(json.dumps(fields))
        body = ',\n  '.join(entries)
        return f'{{"format": "{FORMAT}",\n "layers": [\n  {body}\n ]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Layers:
        """Return the layers that a file says.

        Raises:
            ValueError: it is not JSON, or not a file of layers; the message names the field.
        """
        data: Any = strict_json.loads(text)
        strict_json.require(data, {'format': strict_json.one_of(FORMAT), 'layers': _ENTRIES})
        found: list[Layer] = []
        for entry in data['layers']:
            strict_json.require(entry, {'kind': strict_json.text}, _FIELDS)
            fields: dict[str, Any] = {str(_READ.get(k, k)): v for k, v in entry.items()}
            count = fields.pop('count', 1)
            if not 1 <= count <= _MOST:
                raise ValueError(
                    f"'count': {count} is not a number of layers: give 1 or more, to {_MOST}"
                )
            found += [Layer(**fields)] * count
        return cls(tuple(found))

    def scaled(self, factor: float) -> Layers:
        """Return the same layers with all times multiplied."""
        return Layers(
            tuple(
                replace(layer, **{name: getattr(layer, name) * factor for name in _NAMES})
                for layer in self.layers
            )
        )


_NAMES = {'forward': 'F', 'backward': 'B', 'weight': 'W'}
_READ = {short: name for name, short in _NAMES.items()}
_AMOUNTS = (*_NAMES, 'activation', 'retained', 'parameters', 'output')
_ENTRIES = strict_json.list_of(strict_json.anything, 'layers', filled=True)
_FIELDS: dict[str, strict_json.Check] = {
    'count': strict_json.integer,
    **{_NAMES.get(name, name): strict_json.number for name in _AMOUNTS},
}
