"""What passes cost: seconds on the device, seconds on the wire, activations held.

>>> from megatron_zbpp.ir import Placement
>>> Costs.uniform(Placement.v(2), weight=0.8).time('W', 0)
0.4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any

from megatron_zbpp.ir import B, F, Graph, Placement, W, strict_json
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.graph import DEVICE
from megatron_zbpp.ir.techniques import TRANSFERS, R

SELECTIVE = 'selective'  # of a file: what differs with Megatron's selective recomputation
_RECOMPUTED = (F, B, W, 'activation', 'retained', 'times')
_COPIES = frozenset(kind for copies in TRANSFERS.values() for kind in copies)


@dataclass(frozen=True)
class Costs:
    """Times and activations of every stage. Units are the caller's: seconds and bytes, or 1 and 1.

    Where techniques add sites behind the stages (a shard of the vocabulary on each rank), entries
    of `times` and `amounts` go on with those.

    Attributes:
        forward: per stage in model order, time of one F.
        backward: time of one B. A BW takes that of its B and its W.
        weight: time of one W.
        comm: latency of each message between ranks; it does not occupy the device.
        message: further time of a message, bytes over bandwidth; added to the latency.
        activation: per stage, held from the start of its F. Default: 1 a stage.
        retained: held in its place from the end of B to the end of W. It may be more: gradients of
            outputs, and inputs that tensor parallelism has gathered, wait for W. Default: as much.
        parameters: per stage, held all the time: weights, gradients and the optimizer's states, in
            the unit of `activation`. They count against a memory limit. Default: 0.
        times: of one pass of other kinds, by kind: O, L, R, S, ... Default: 0.
        amounts: that other techniques hold, by the name that the graph gives them: 'input',
            'logits'. Default: 0.
        edges: (sender, receiver, latency) of pairs of ranks whose latency is not `comm`.
        speeds: per rank, how many times as fast as the times say. Default: 1 each.
        together: time of passes that run as one (`ir.Together`), over the sum of theirs. Default:
            1, nothing is hidden.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    comm: float = 0.0
    message: float = 0.0
    activation: tuple[float, ...] = ()
    retained: tuple[float, ...] = ()
    parameters: tuple[float, ...] = ()
    times: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    amounts: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    edges: tuple[tuple[int, int, float], ...] = ()
    speeds: tuple[float, ...] = ()
    together: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, 'activation', self.activation or (1.0,) * len(self.forward))
        object.__setattr__(self, 'retained', self.retained or self.activation)
        object.__setattr__(self, 'parameters', self.parameters or (0.0,) * len(self.forward))
        for name in ('forward', 'backward', 'weight', 'activation', 'retained', 'parameters'):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            _require_costs(name, values)
            if len(values) != len(self.forward):
                raise ValueError(
                    f'{name} has {len(values)} entries and forward {len(self.forward)}: '
                    'give one entry per stage'
                )
        for name in ('times', 'amounts'):
            given = {key: tuple(values) for key, values in getattr(self, name).items()}
            object.__setattr__(self, name, given)
            for key, values in given.items():
                _require_costs(f'{name} of {key}', values)
                if len(values) < len(self.forward):
                    raise ValueError(
                        f'{name} of {key} has {len(values)} entries: give one per stage, '
                        f'{len(self.forward)}, and behind them what else there is'
                    )
        for kind in {F, B, W} & set(self.times):
            raise ValueError(f'times of {kind} are given twice: leave them out of `times`')
        object.__setattr__(self, 'edges', tuple(map(tuple, self.edges)))
        object.__setattr__(self, 'speeds', tuple(self.speeds))
        _require_costs('comm', (self.comm,))
        _require_costs('message', (self.message,))
        _require_costs('together', (self.together,))
        if not self.together:
            raise ValueError('together = 0: what runs as one takes time: give a share above 0')
        _require_costs('edges', tuple(latency for _, _, latency in self.edges))
        _require_costs('speeds', self.speeds)
        if 0 in self.speeds:
            raise ValueError('a speed of 0 never ends: give numbers above 0')

    @classmethod
    def from_json(cls, text: str, selective: bool = False, **defaults: Any) -> Costs:
        """Return the costs that a file says: F, B and W by stage, and any other field by its name.

        Args:
            text: of the file.
            selective: whether those with Megatron's selective recomputation, which the file says
                under `SELECTIVE`; what it is silent of there is as without.
            defaults: fields, for where the file is silent.

        Raises:
            ValueError: it is not one JSON object, lacks a time, or has a field that is not known or
                of another type; the message names it.
        """
        data: Any = strict_json.loads(text)
        if not strict_json.is_object(data):
            raise ValueError('costs are one JSON object: {"F": [...], "B": [...], "W": [...]}')
        fields = {F: 'forward', B: 'backward', W: 'weight'}
        known = {**dict.fromkeys(fields, _NUMBERS), **_OTHERS}
        strict_json.require(data, {}, {**known, SELECTIVE: strict_json.anything})
        within = data.pop(SELECTIVE, None)
        if selective and within is None:
            raise ValueError(
                'nothing is said of what passes take with selective recomputation: give '
                f'"{SELECTIVE}": {{"B": [...], "activation": [...]}}'
            )
        if within is not None:
            strict_json.require(within, {}, {name: known[name] for name in _RECOMPUTED})
            data = {**data, **_within(data, within)} if selective else data
        for name in fields:
            if name not in data:
                raise ValueError(f'the times of {name} are missing: give "{name}": [...]')
        if not data[F]:
            raise ValueError('F has no entries: give one entry per stage')
        return cls(**defaults | {fields.get(name, name): value for name, value in data.items()})

    @classmethod
    def from_fields(cls, data: Any) -> Costs:
        """Return the costs of which `dataclasses.asdict` gave the fields, by way of JSON.

        Raises:
            ValueError: it is none; the message names the field.
        """
        strict_json.require(data, _TIMES, _OTHERS)
        return cls(**data)

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        forward: float = 1.0,
        backward: float = 1.0,
        weight: float = 1.0,
        comm: float = 0.0,
    ) -> Costs:
        """Equal ranks: of the times, ONE FULL RANK's, a stage on a rank of v chunks takes a v-th.

        A stage's activation, all of it retained until W, is a v-th of one full rank's. Chunks are
        those that a microbatch visits: a copy of the model on a second route is no further chunk.
        """
        route = placement.routes[0]
        shares = tuple(1 / route.count(rank) for rank in route)
        forwards, backwards, weights = (
            tuple(time * share for share in shares) for time in (forward, backward, weight)
        )
        return cls(forwards, backwards, weights, comm, activation=shares, retained=shares)

    @classmethod
    def by_layers(cls, placement: Placement, layers: Sequence[int]) -> Costs:
        """Return costs in proportion to layers: F = B = W = 1 on a rank with a mean number of them.

        Args:
            placement: of the stages.
            layers: of each stage in model order, alike; none at all: stages are equal.
        """
        total = sum(layers)
        if not total:
            return cls.uniform(placement)
        shares = tuple(count * placement.num_ranks / total for count in layers)
        return cls(shares, shares, shares, activation=shares, retained=shares)

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def edge(self, sender: int, receiver: int) -> float:
        """Return the time from the end of a pass to when another rank may start on what it sent.

        Between stages of one rank it is 0.
        """
        if sender == receiver:
            return 0.0
        return self._latencies.get((sender, receiver), self.comm) + self.message

    @cached_property
    def _latencies(self) -> dict[tuple[int, int], float]:
        return {(sender, receiver): latency for sender, receiver, latency in self.edges}

    def time(self, kind: str, stage: int) -> float:
        """Time of one task of `kind` on `stage`, on a rank of speed 1.

        Of R that of F, where nothing else is told.
        """
        own = {F: self.forward, B: self.backward, W: self.weight}.get(kind)
        own = self.times.get(kind) if own is None else own
        own = self.forward if own is None and kind == R else own
        return 0.0 if own is None else own[stage]

    def duration(self, graph: Graph, kind: str, stage: int, rank: int) -> float:
        """Time of one pass of `kind` on `stage` on `rank`: of all that it does, of a slice each."""
        time = sum([self.time(task.kind, stage) for task in graph.tasks(kind, stage)])
        return time / graph.num_slices / (self.speeds[rank] if self.speeds else 1.0)

    def amount(self, name: str, stage: int) -> float:
        """How much of the amount that `ir.graph.Hold` calls `name` a task of `stage` takes."""
        own = {'activation': self.activation, 'retained': self.retained}.get(name)
        own = self.amounts.get(name) if own is None else own
        return 0.0 if own is None else own[stage]

    def static(self, placement: Placement) -> tuple[float, ...]:
        """Return what each rank holds all the time, in the unit of `activation`."""
        self.require(placement)
        held = map(placement.stages, range(placement.num_ranks))
        return tuple(sum(self.parameters[stage] for stage in own) for own in held)

    def changes(self, graph: Graph, pool: str = DEVICE) -> dict[tuple[str, int, int], float]:
        """Return what each pass adds to `pool`, by its kind, stage and slice."""
        return {
            key: sum([count * self.amount(name, key[1]) for name, count in counts.items()])
            / graph.num_slices
            for key, counts in compiled(graph).changes.get(pool, {}).items()
        }

    def require(self, placement: Placement) -> None:
        """Raise ValueError unless there is one entry for each stage and rank of `placement`."""
        if self.num_stages != placement.num_stages:
            raise ValueError(
                f'costs of {self.num_stages} stages do not fit a placement of '
                f'{placement.num_stages}: give one entry per stage'
            )
        if self.speeds and len(self.speeds) != placement.num_ranks:
            raise ValueError(
                f'{len(self.speeds)} speeds do not fit {placement.num_ranks} ranks: give one each'
            )
        for sender, receiver, _ in self.edges:
            if not {sender, receiver} <= set(range(placement.num_ranks)):
                raise ValueError(
                    f'an edge from rank {sender} to rank {receiver}: there are ranks 0 to '
                    f'{placement.num_ranks - 1}'
                )


def _within(data: dict[str, Any], within: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of selective recomputation, with the times of kinds that it is silent of.

    A copy of less takes less: where nothing else is told, times of copies are as activations.
    """
    kinds = dict(data.get('times', {}))
    before, after = data.get('activation'), within.get('activation')
    if before and after and len(before) == len(after):
        shares = [new / old if old else 1.0 for new, old in zip(after, before, strict=True)]
        for kind in _COPIES & set(kinds):
            kinds[kind] = [time * share for time, share in zip(kinds[kind], shares, strict=False)]
    return {**within, 'times': {**kinds, **within.get('times', {})}}


def _per_stage(value: Any) -> str | None:
    """Check numbers of which there are some."""
    return None if value and _NUMBERS(value) is None else 'a list of numbers, one per stage'


def _by_name(value: Any) -> str | None:
    """Check numbers under names."""
    fits = strict_json.is_object(value) and all(_NUMBERS(entry) is None for entry in value.values())
    return None if fits else 'an object of lists of numbers, such as {"R": [1, 1]}'


def _edge_list(value: Any) -> str | None:
    """Check latencies between ranks."""
    fits = strict_json.is_list(value) and all(
        strict_json.is_list(edge)
        and len(edge) == 3
        and all(strict_json.integer(rank) is None for rank in edge[:2])
        and strict_json.number(edge[2]) is None
        for edge in value
    )
    return None if fits else 'a list of [sender, receiver, latency]'


_NUMBERS = strict_json.list_of(strict_json.number, 'numbers')
_TIMES: dict[str, strict_json.Check] = dict.fromkeys(('forward', 'backward', 'weight'), _NUMBERS)
_OTHERS = {  # fields of a file, but for the times of F, B and W
    **dict.fromkeys(('comm', 'message', 'together'), strict_json.number),
    **dict.fromkeys(('activation', 'retained', 'parameters'), _per_stage),
    'speeds': _NUMBERS,
    **dict.fromkeys(('times', 'amounts'), _by_name),
    'edges': _edge_list,
}


def _require_costs(name: str, values: tuple[float, ...]) -> None:
    """Raise ValueError unless all of `values` are finite and not negative."""
    for value in values:
        if not (isfinite(value) and value >= 0):
            raise ValueError(f'{name} = {value} is not a cost: give finite numbers from 0 up')
