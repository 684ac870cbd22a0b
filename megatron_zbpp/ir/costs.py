"""Costs of passes: seconds on the device, seconds on the wire, activations held.

>>> from megatron_zbpp.ir import Placement, Task
>>> Costs.uniform(Placement.v(2), weight=0.8).time(Task('W', 0))
0.4
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum, isfinite
from typing import TYPE_CHECKING, Any

from megatron_zbpp.ir import B, F, Graph, Placement, Task, W
from megatron_zbpp.ir.graph import BROADCAST, DEVICE, KV, KV_GRADIENT, R, compiled

if TYPE_CHECKING:
    from megatron_zbpp.ir import Schedule

_WHOLE = frozenset({F, B, W, KV, KV_GRADIENT})  # they are as no other is
_EXACT = (F, B, W, 'activation', 'retained')  # of stages alone, as only they have weights


@dataclass(frozen=True)
class Costs:
    """Times and amounts of every stage. Units are the caller's: seconds and bytes, or 1 and 1.

    Entry `s` of a tuple is stage s in model order. Where techniques add sites behind the stages (a
    shard of the vocabulary on each rank), the entries of their kinds and amounts go on with those.
    A slice of the sequence takes its equal part, or that in `parts`.

    Attributes:
        times: by kind (F, B, W, R, O, ...), the time of one task of each stage. F, B and W are
            required, a BW takes that of its B and its W. R takes the time of F where it is not
            given, other kinds none.
        amounts: by the name that the graph gives them, memory of each stage. 'activation' is held
            from the start of F, default 1 a stage. 'retained' is held in its place from the end of
            B to the end of W, default as much; it may be more: gradients of outputs, and inputs
            that tensor parallelism has gathered, wait for W. Others ('input', 'logits'): default 0.
        comm: latency of each message between ranks; it does not occupy the device.
        message: further time of a message, bytes over bandwidth; added to the latency.
        parameters: per stage, held all the time: weights, gradients and the optimizer's states, in
            the unit of 'activation'. They count against a memory limit. Default: 0.
        edges: (sender, receiver, latency) of pairs of ranks whose latency is not `comm`.
        hops: by stage but for the last, further time of what it sends to the next stage, and of the
            gradient that comes back: bytes over bandwidth, where edges carry unlike ones.
        speeds: per rank, how many times as fast as the times say. Default: 1 each.
        together: time of passes that run as one (`ir.Together`), over the sum of theirs. Default:
            1, nothing is hidden.
        pairs: the same of pairs other than a forward and a backward: 'FF' of two forwards, 'FW' of
            a forward and a W. Default: `together`.
        parts: by a name of `times` or `amounts`, and there by stage, the share that each slice of
            the sequence has. Where each slice takes a time of its own, they sum to more than 1.
            R takes those of F, 'kv' and 'kv_gradient', which are of all slices, equal ones, others
            that are not given those of 'activation'. Sites behind the stages are as the last.
        collectives: by message, time of its collective from the last contribution on. Default: that
            of a message between two ranks.
    """

    times: Mapping[str, tuple[float, ...]]
    amounts: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    comm: float = 0.0
    message: float = 0.0
    parameters: tuple[float, ...] = ()
    edges: tuple[tuple[int, int, float], ...] = ()
    speeds: tuple[float, ...] = ()
    together: float = 1.0
    pairs: Mapping[str, float] = field(default_factory=dict[str, float])
    parts: Mapping[str, tuple[tuple[float, ...], ...]] = field(
        default_factory=dict[str, tuple[tuple[float, ...], ...]]
    )
    collectives: Mapping[str, float] = field(default_factory=dict[str, float])
    hops: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        times, amounts = (
            {name: tuple(values) for name, values in given.items()}
            for given in (self.times, self.amounts)
        )
        for kind in (F, B, W):
            if kind not in times:
                raise ValueError(f'the times of {kind} are missing: give "{kind}": [...]')
        if not times[F]:
            raise ValueError('F has no entries: give one entry per stage')
        activation = amounts.pop('activation', ()) or (1.0,) * len(times[F])
        held = {'activation': activation, 'retained': amounts.pop('retained', ()) or activation}
        fields: dict[str, Any] = {
            'times': times,
            'amounts': held | amounts,
            'parameters': tuple(self.parameters) or (0.0,) * len(times[F]),
            'edges': tuple(map(tuple, self.edges)),
            'speeds': tuple(self.speeds),
            'hops': tuple(map(tuple, self.hops)),
            'parts': {name: tuple(map(tuple, own)) for name, own in self.parts.items()},
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        for name, values in {**times, **self.amounts, 'parameters': self.parameters}.items():
            _require_costs(name, values)
            if name in (*_EXACT, 'parameters') and len(values) != self.num_stages:
                raise ValueError(
                    f'{name} has {len(values)} entries and F {self.num_stages}: give one entry '
                    'per stage'
                )
            if len(values) < self.num_stages:
                raise ValueError(
                    f'{name} has {len(values)} entries: give one per stage, {self.num_stages}, '
                    'and behind them what else there is'
                )
        for name, values in {
            'comm': (self.comm,),
            'message': (self.message,),
            'together': (self.together, *self.pairs.values()),
            'collectives': self.collectives.values(),
        }.items():
            _require_costs(name, values)
        if not all((self.together, *self.pairs.values())):
            raise ValueError('together = 0: what runs as one takes time: give a share above 0')
        if unknown := self.pairs.keys() - {'FF', 'FW'}:
            raise ValueError(
                f'pairs has {", ".join(sorted(unknown))}: give FF, FW or both; "together" is of a '
                'forward and a backward'
            )
        _require_costs('edges', (latency for _, _, latency in self.edges))
        _require_costs('speeds', self.speeds)
        if 0 in self.speeds:
            raise ValueError('a speed of 0 never ends: give numbers above 0')
        _require_costs('hops', (time for hop in self.hops for time in hop))
        if self.hops and [*map(len, self.hops)] != [2] * (self.num_stages - 1):
            raise ValueError(
                f'hops has {len(self.hops)} entries: give [forward, back] for each of the '
                f'{self.num_stages - 1} stages before the last'
            )
        self._require_parts()

    def _require_parts(self) -> None:
        counts = {len(shares) for own in self.parts.values() for shares in own}
        if len(counts) > 1 or 0 in counts:
            raise ValueError(
                f'parts are of {" and ".join(map(str, sorted(counts)))} slices: give a share for '
                'each slice, of as many slices everywhere'
            )
        for name, own in self.parts.items():
            if name not in self.times and name not in self.amounts:
                raise ValueError(
                    f'parts of {name}, which has no time nor amount: give those, or leave it out'
                )
            if len(own) < self.num_stages:
                raise ValueError(
                    f'parts of {name} has {len(own)} entries: give the shares of slices for each '
                    f'of {self.num_stages} stages'
                )
            for shares in own:
                _require_costs(f'parts of {name}', shares)

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        weight: Sequence[float],
        comm: float = 0.0,
        message: float = 0.0,
        *,
        activation: Sequence[float] = (),
        retained: Sequence[float] = (),
        times: Mapping[str, Sequence[float]] | None = None,
        amounts: Mapping[str, Sequence[float]] | None = None,
        **others: Any,
    ) -> Costs:
        """Return the costs of a plain pipeline, with those of techniques beside them.

        Args:
            forward: per stage in model order, time of one F.
            backward: time of one B.
            weight: time of one W.
            comm: see `Costs`.
            message: see `Costs`.
            activation: per stage, held from F to B; see `Costs`.
            retained: per stage, held from B to W; see `Costs`.
            times: of further kinds.
            amounts: that techniques hold.
            others: further fields of `Costs`.

        Raises:
            ValueError: a value is no cost, entries are missing, or a kind is given twice.
        """
        plain = {F: forward, B: backward, W: weight}
        for kind, each in plain.items():
            if isinstance(each, int | float):
                raise ValueError(
                    f'{kind} is {each!r}: give a list, one time for each stage, or take '
                    'Costs.uniform(placement) with one time for all'
                )
        for kind in plain.keys() & (times or {}).keys():
            raise ValueError(f'times of {kind} are given twice: leave them out of `times`')
        held = {'activation': activation, 'retained': retained}
        given: Any = {**plain, **(times or {})}
        named: Any = {**held, **(amounts or {})}
        return cls(given, named, comm, message, **others)

    def with_times(self, **kinds: Sequence[float]) -> Costs:
        """Return the same with other times of these kinds.

        >>> Costs.of([1], [1], [1]).with_times(W=[0], R=[2]).times['W']
        (0,)
        """
        return replace(self, times={**self.times, **kinds})

    def with_amounts(self, **names: Sequence[float]) -> Costs:
        """Return the same with other amounts of these names."""
        return replace(self, amounts={**self.amounts, **names})

    def with_parts(self, **names: Sequence[Sequence[float]]) -> Costs:
        """Return the same with these shares of slices."""
        return replace(self, parts={**self.parts, **names})

    def joined(self, stages: int) -> Costs | None:
        """Return the costs of as many stages of the same model; None: they do not join so.

        Neighbours are joined, or each is cut into equal parts. Kinds of passes other than F, B and
        W are left out, as are parts of slices.
        """
        own = self.num_stages
        if stages % own and own % stages:
            return None

        def sums(values: Sequence[float]) -> list[float]:
            if stages > own:
                parts = stages // own
                return [value / parts for value in values for _ in range(parts)]
            each = own // stages
            return [fsum(values[at : at + each]) for at in range(0, own, each)]

        f, b, w = (sums(self.times[kind]) for kind in (F, B, W))
        ends = [(at + 1) * own // stages - 1 for at in range(stages - 1)]
        return Costs.of(
            *(f, b, w, self.comm, self.message),
            activation=sums(self.amounts['activation']),
            retained=sums(self.amounts['retained']),
            parameters=sums(self.parameters),
            edges=self.edges,
            speeds=self.speeds,
            hops=tuple(self.hops[max(0, end)] for end in ends) if self.hops else (),
        )

    @classmethod
    def from_json(
        cls, text: str, selective: bool = False, activation: Sequence[float] = ()
    ) -> Costs:
        """Return the costs in a file: F, B and W by stage, and any field of `Costs` by its name.

        F, B, W may stand in "times", 'activation' and 'retained' in "amounts", as other kinds and
        amounts do, or outside of them.

        Args:
            text: of the file.
            selective: whether those with Megatron's selective recomputation, which the file says
                under that name; what it is silent of there is as without.
            activation: for where the file is silent.

        Raises:
            ValueError: it is not one JSON object, lacks a time, or has a field that is not known or
                of another type; the message names it.
        """
        from megatron_zbpp.ir import costs_file  # which no run without a file needs

        return cls(**costs_file.read(text, selective, activation))

    @classmethod
    def from_fields(cls, data: Any) -> Costs:
        """Return the costs of which `dataclasses.asdict` gave the fields, by way of JSON.

        Fields of 0.1 are read, too, which had `forward`, `backward` and `weight` beside `times`.

        Raises:
            ValueError: it is none; the message names the field.
        """
        from megatron_zbpp.ir import costs_file

        return cls(**costs_file.fields(data))

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
        return cls.of(forwards, backwards, weights, comm, activation=shares)

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
        return cls.of(shares, shares, shares, activation=shares)

    @classmethod
    def known(cls, schedule: Schedule, layers: Sequence[int] = ()) -> Costs:
        """Return the costs that `schedule` was planned for, else those by `layers` of stages."""
        return schedule.costs or cls.by_layers(schedule.placement, layers)

    @property
    def num_stages(self) -> int:
        return len(self.times[F])

    def edge(self, sender: int, receiver: int, stages: Sequence[int] = ()) -> float:
        """Return the time from the end of a pass to when another rank may start on what it sent.

        On one rank it is 0. Without the `stages` of the two what hops take is left out.
        """
        if sender == receiver:
            return 0.0
        time = self._latencies.get((sender, receiver), self.comm) + self.message
        made, taken = stages or (0, 0)
        first = min(made, taken)
        if abs(made - taken) == 1 and 0 <= first < len(self.hops):
            time += self.hops[first][made > taken]
        return time

    def travel(
        self, graph: Graph, message: str, ranks: tuple[int, int], stages: Sequence[int]
    ) -> float:
        """Return the time of `message`, be it from rank to rank or in a collective.

        What is gathered or reduced takes that on the rank of its maker, too. Of maker and taker:
        the `ranks`, and the `stages`.
        """
        collective = graph.collectives.get(message)
        sender, receiver = ranks
        if collective is None or message not in self.collectives:
            return self.edge(sender, receiver, stages)
        if collective.operation == BROADCAST and sender == receiver:
            return 0.0
        return self.collectives[message] + self.collectives.get(collective.after, 0.0)

    @cached_property
    def _latencies(self) -> dict[tuple[int, int], float]:
        return {(sender, receiver): latency for sender, receiver, latency in self.edges}

    def time(self, task: Task) -> float:
        """Return the time of `task`, of all slices, on a rank of speed 1."""
        own = self.times.get(task.kind)
        own = self.times[F] if own is None and task.kind == R else own
        return 0.0 if own is None else own[task.stage]

    def duration(self, graph: Graph, kind: str, stage: int, rank: int, slice: int = 0) -> float:
        """Return the time of one pass of `kind` on `stage` on `rank`: of all it does."""
        share, n = self.share, graph.num_slices
        time = sum(
            [
                self.time(task) * (share(task.kind, task, n) if n > 1 else 1.0)
                for task in graph.tasks(kind, stage, slice)
            ]
        )
        return time / (self.speeds[rank] if self.speeds else 1.0)

    def share(self, name: str, task: Task, num_slices: int) -> float:
        """Return the share that the slice of `task` has of a time or an amount of its stage."""
        if num_slices == 1:
            return 1.0
        like = name if name in _WHOLE else F if name == R else 'activation'
        own = self.parts.get(name, self.parts.get(like))
        if own is None:
            return 1 / num_slices
        shares = own[min(task.stage, len(own) - 1)]
        if len(shares) != num_slices:
            raise ValueError(
                f'costs have parts of {len(shares)} slices, and the schedule has {num_slices}: '
                'give those of as many, or leave "parts" out'
            )
        return shares[task.slice]

    @property
    def least_share(self) -> float:
        """The least that passes take, over the time that they take one by one."""
        return min(1.0, self.together, *self.pairs.values())

    def amount(self, name: str, task: Task) -> float:
        """Return how much of what `ir.graph.Hold` calls `name` the task takes, of all slices."""
        own = self.amounts.get(name)
        return 0.0 if own is None else own[task.stage]

    def static(self, placement: Placement) -> tuple[float, ...]:
        """Return the static memory of each rank, in the unit of `activation`."""
        self.require(placement)
        held = map(placement.stages, range(placement.num_ranks))
        return tuple(sum(self.parameters[stage] for stage in own) for own in held)

    def changes(self, graph: Graph, pool: str = DEVICE) -> dict[tuple[str, int, int], float]:
        """Return the amount that each pass adds to `pool`, by its kind, stage and slice."""
        return {
            key: sum(
                [
                    count * self.amount(name, task) * self.share(name, task, graph.num_slices)
                    for name, count in counts.items()
                ]
            )
            for key, counts in compiled(graph).changes.get(pool, {}).items()
            for task in (Task(*key),)
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


def _require_costs(name: str, values: Iterable[float]) -> None:
    for value in values:
        if not (isfinite(value) and value >= 0):
            raise ValueError(f'{name} = {value} is not a cost: give finite numbers from 0 up')
