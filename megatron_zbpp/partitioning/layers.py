"""Layers of a model, and devices with the links between them: costs from files or to them.

>>> layers = Layers.from_json('''{"format": "megatron_zbpp.layers/1", "layers": [
...     {"kind": "E", "F": 1, "W": 1}, {"kind": "t", "count": 2, "F": 2, "B": 2, "W": 2},
...     {"kind": "L", "F": 4, "B": 4, "W": 4}]}''')
>>> len(layers), layers.text((2, 2))
(4, 'Et|tL')
>>> devices = Devices.from_json('{"devices": [{"name": "a"}, {"name": "b", "factor": {"F": 2}}]}')
>>> devices.devices[1].factors, devices.edge(0, 1, 8.0)
((2, 1.0, 1.0), 0.0)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, groupby, pairwise
from math import inf, isfinite
from typing import Any

from megatron_zbpp.ir import strict_json

FORMAT = 'megatron_zbpp.layers/1'
_MOST = 100_000  # layers of an entry
KINDS = frozenset('EtmLM*+-GD')  # letters of layers in Megatron's layouts and patterns
EMBEDDING, DECODER, MTP, LOSS = 'E', 't', 'm', 'L'


@dataclass(frozen=True)
class Layer:
    """Costs of one layer for one microbatch. Units are the caller's, the same for all layers."""

    # a letter of the layout: E embedding, t decoder, m multi-token prediction, L output layer and
    # loss; of a hybrid model, those of its pattern
    kind: str
    forward: float = 0.0  # time of F
    backward: float = 0.0  # time of B
    weight: float = 0.0  # time of W
    activation: float = 1.0  # held from the start of F
    retained: float | None = None  # held instead from the end of B to that of W; None: as much
    parameters: float = 0.0  # weights, gradients and optimizer states, in the unit of `activation`
    output: float = 0.0  # of a message, in units of which `Devices.bandwidth` has some a time unit

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
    """The layers of a model in its order."""

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
            fields = {_NAMES.get(name, name): value for name, value in asdict(layer).items()}
            counted = {'count': count} if count > 1 else {}
            entries.append(json.dumps({'kind': fields.pop('kind'), **counted, **fields}))
        body = ',\n  '.join(entries)
        return f'{{"format": "{FORMAT}",\n "layers": [\n  {body}\n ]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Layers:
        """Return the layers that a file says; a ValueError names the field."""
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
        own = ({name: getattr(x, name) * factor for name in _NAMES} for x in self.layers)
        return Layers(tuple(replace(x, **each) for x, each in zip(self.layers, own, strict=True)))


_NAMES = {'forward': 'F', 'backward': 'B', 'weight': 'W'}
_READ = {short: name for name, short in _NAMES.items()}
_AMOUNTS = (*_NAMES, 'activation', 'retained', 'parameters', 'output')
_ENTRIES = strict_json.list_of(strict_json.anything, 'layers', filled=True)
_FIELDS: dict[str, strict_json.Check] = {
    'count': strict_json.integer,
    **{_NAMES.get(name, name): strict_json.number for name in _AMOUNTS},
}


@dataclass(frozen=True)
class Device:
    """One rank's machine."""

    name: str = ''  # for people
    # by which it multiplies the times of F, B and W: 2 is half as fast
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    memory: float = inf  # of activations and parameters, in the unit of the layers' `activation`

    def __post_init__(self) -> None:
        for factor in self.factors:
            if not (isfinite(factor) and factor > 0):
                raise ValueError(f'device {self.name!r}: factor {factor}: give a number above 0')
        if not self.memory > 0:
            raise ValueError(f'device {self.name!r}: memory {self.memory}: give a number above 0')


@dataclass(frozen=True)
class Devices:
    """Devices, and the links between each two; by default links take no time."""

    devices: tuple[Device, ...]  # one a rank, in the order in which they are named
    # from one (row) to another (column), in the unit of the layers' times
    latency: tuple[tuple[float, ...], ...] = ()
    # the same, in the layers' unit of output a unit of time; 0: endless
    bandwidth: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, 'devices', tuple(self.devices))
        count = len(self.devices)
        if not count:
            raise ValueError('no devices: give at least one')
        for name in ('latency', 'bandwidth'):
            rows = tuple(tuple(row) for row in getattr(self, name))
            object.__setattr__(self, name, rows)
            if rows and (len(rows) != count or any(len(row) != count for row in rows)):
                raise ValueError(f'{name} is not {count} rows of {count}: give one a device')
            for value in (value for row in rows for value in row):
                if not (isfinite(value) and value >= 0):
                    raise ValueError(f'{name} has {value}: give numbers from 0 up')

    @classmethod
    def alike(cls, count: int) -> Devices:
        """Return so many devices that are alike, with links that take no time."""
        return cls(tuple(Device(str(rank)) for rank in range(count)))

    def __len__(self) -> int:
        return len(self.devices)

    def ordered(self, order: Sequence[int]) -> Devices:
        """Return the same devices with their links, named in another order."""
        latency, bandwidth = (
            tuple(tuple(rows[a][b] for b in order) for a in order) if rows else ()
            for rows in (self.latency, self.bandwidth)
        )
        return Devices(tuple(self.devices[d] for d in order), latency, bandwidth)

    def edge(self, sender: int, receiver: int, output: float) -> float:
        """Return the time of a message of `output` from one device to another; 0 on one device."""
        if sender == receiver:
            return 0.0
        latency = self.latency[sender][receiver] if self.latency else 0.0
        bandwidth = self.bandwidth[sender][receiver] if self.bandwidth else 0.0
        return latency + (output / bandwidth if bandwidth else 0.0)

    def signature(self, order: Sequence[int], output: float) -> tuple[object, ...]:
        """Return the facts by which orders of devices differ: factors, memory, links."""
        own = tuple((self.devices[d].factors, self.devices[d].memory) for d in order)
        if not (self.latency or self.bandwidth):
            return own
        pairs = zip(order, (*order[1:], order[0]), strict=True)
        return own, tuple((self.edge(a, b, output), self.edge(b, a, output)) for a, b in pairs)

    def to_json(self) -> str:
        """Return one JSON object."""
        entries = [
            {
                'name': device.name,
                'factor': dict(zip('FBW', device.factors, strict=True)),
                **({'memory': device.memory} if device.memory < inf else {}),
            }
            for device in self.devices
        ]
        links = {'latency': self.latency, 'bandwidth': self.bandwidth}
        return json.dumps(
            {'devices': entries, **{name: rows for name, rows in links.items() if rows}}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> Devices:
        """Return the devices that a file says; a ValueError names the field."""
        data: Any = strict_json.loads(text)
        strict_json.require(data, {'devices': _DEVICES}, {'latency': _ROWS, 'bandwidth': _ROWS})
        found: list[Device] = []
        for entry in data['devices']:
            strict_json.require(entry, {}, _DEVICE)
            factor: Any = entry.get('factor', {})
            strict_json.require(factor, {}, dict.fromkeys('FBW', strict_json.number))
            first, second, third = (factor.get(kind, 1.0) for kind in 'FBW')
            memory = entry.get('memory', inf)
            found.append(Device(entry.get('name', ''), (first, second, third), memory))
        return cls(tuple(found), data.get('latency', ()), data.get('bandwidth', ()))


_DEVICES = strict_json.list_of(strict_json.anything, 'devices', filled=True)
_ROWS = strict_json.list_of(strict_json.list_of(strict_json.number, ''), 'rows of numbers')
_DEVICE: dict[str, strict_json.Check] = {
    'name': strict_json.text,
    'factor': strict_json.anything,
    'memory': strict_json.number,
}
