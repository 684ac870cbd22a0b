"""Recomputation of any schedule: forwards keep their input only, and run again before B.

R of a pass is right before its B, where it waits for nothing but the rank. It comes earlier where
the rank would idle: as long as the whole of it fits there, and nothing more is held than otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from megatron_zbpp.analysis.memory import lifetimes
from megatron_zbpp.ir import BW, B, F, Pass, Placement, Schedule, Task, chain
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import R
from megatron_zbpp.schedules.construct.draft import Draft
from megatron_zbpp.schedules.construct.phases import phases
from megatron_zbpp.techniques.amounts import Amount, chunks_of
from megatron_zbpp.techniques.base import Life, Technique, Way, lack_of_times
from megatron_zbpp.techniques.composition import require_goes_with
from megatron_zbpp.techniques.recompute.graph import recompute

_SLACK = 1e-9


def recomputed(schedule: Schedule, amount: Amount, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with forwards of the first chunks of each rank run again before B.

    Chunks live the longer the earlier they are. A stage whose B follow their F at once has nothing
    to gain and keeps what it saves. (Chen et al., arXiv 1604.06174; GPipe, arXiv 1811.06965.)

    Args:
        schedule: without recomputation. What it keeps on partners (BPipe) is then the input of what
            runs again. Copies to the host it cannot have: they were given times without R.
        amount: 'half', 'all', or how many chunks of each rank.
        costs: of its stages, by which idle times are known; default: F = B = W.

    Raises:
        ValueError: it has what this does not go with, or an amount that makes no sense.
    """
    require_goes_with(schedule, recompute.__name__)
    placement = schedule.placement
    chunks = chunks_of(amount, placement.num_chunks, 'recompute')
    stages = [s for s in range(placement.num_stages) if placement.chunk_of(s) < chunks]
    found = with_recomputation(schedule, stages, costs or Costs.uniform(placement))
    return replace(found, name=f'{schedule.name} + recompute {amount}')


def with_recomputation(schedule: Schedule, stages: Iterable[int], costs: Costs) -> Schedule:
    """Return `schedule` with forwards of those of `stages` that gain by it run again before B."""
    stages = [stage for stage in stages if _waits(schedule, stage)]
    plain = replace(schedule, graph=recompute(schedule.graph, stages), phases=())
    orders = _Filling(plain, frozenset(stages), costs).orders()
    return replace(plain, passes=orders, together=frozenset(_moved(schedule, orders)))


def _waits(schedule: Schedule, stage: int) -> bool:
    return any(
        life.last > life.first + 1
        for order in schedule.passes
        for life in lifetimes(order, (stage,))
    )


def _moved(schedule: Schedule, orders: tuple[tuple[Pass, ...], ...]) -> Iterator[tuple[int, int]]:
    for rank, at in schedule.together:
        first, second = schedule.passes[rank][at : at + 2]
        place = orders[rank].index(first)
        if orders[rank][place + 1] == second:
            yield rank, place


class _Filling:
    """Runs the passes of all ranks in time, and puts each R where its rank would idle.

    Args:
        schedule: its graph has R, its orders have none.
        stages: that recompute.
        costs: of its stages.
    """

    def __init__(self, schedule: Schedule, stages: frozenset[int], costs: Costs) -> None:
        self._schedule = schedule
        self._stages = stages
        self._costs = costs
        self._left = [list(order) for order in schedule.passes]
        self._orders: list[list[Pass]] = [[] for _ in schedule.passes]
        self._clocks = [0.0] * len(self._left)
        self._ends: dict[Pass, float] = {}
        self._known: dict[Pass, tuple[tuple[Pass, float], ...]] = {}
        self._inputs: dict[Pass, Pass] = {}
        self._lengths: dict[tuple[str, int, int, int], float] = {}
        self._backward = frozenset(schedule.graph.doers[B])
        self._beside = compiled(schedule.graph).on_copy_engines
        self._change = costs.changes(schedule.graph)
        self._held = [0.0] * len(self._left)  # now
        self._most = [self._highest(rank) for rank in range(len(self._left))]

    def orders(self) -> tuple[tuple[Pass, ...], ...]:
        while True:
            moments = [(self._moment(rank), rank) for rank, left in enumerate(self._left) if left]
            if not moments:
                return tuple(map(tuple, self._orders))
            moment, rank = min(moments)
            if moment == inf:  # of an order that waits in a circle, which `check` tells
                return tuple(tuple(self._rest(rank)) for rank in range(len(self._left)))
            self._step(rank)

    def _moment(self, rank: int) -> float:
        """Return when the rank decides next: when it is free, or its input is there."""
        free = self._clocks[rank]
        if self._own_again(rank) or (free < self._ready(rank) and self._filler(rank)):
            return free
        return max(free, self._ready(rank))

    def _step(self, rank: int) -> None:
        p, ready = self._left[rank][0], self._ready(rank)
        again = self._own_again(rank)
        if again is None and self._clocks[rank] < ready:
            again = self._filler(rank)
        if again is not None:
            self._run(rank, again, self._clocks[rank])
            return
        self._left[rank].pop(0)
        self._run(rank, p, max(ready, self._clocks[rank]))

    def _run(self, rank: int, p: Pass, start: float) -> None:
        end = start + self._length(p, rank)
        self._orders[rank].append(p)
        self._held[rank] += self._changed(p)
        self._clocks[rank] = self._ends[p] = end

    def _own_again(self, rank: int) -> Pass | None:
        """Return the R that the next pass waits for."""
        return self._again(self._left[rank][0])

    def _again(self, p: Pass) -> Pass | None:
        """Return the R of a backward that has not run yet."""
        if p.stage not in self._stages or p.kind not in self._backward:
            return None
        again = p._replace(kind=R)
        return None if again in self._ends else again

    def _filler(self, rank: int) -> Pass | None:
        """Return the R of the next backward that lacks it, if it fits into the time and memory."""
        for p in self._left[rank]:
            again = self._again(p)
            if again is None:
                continue
            if self._kept(again) not in self._ends:
                return None
            if self._clocks[rank] + self._length(again, rank) > self._earliest(rank) + _SLACK:
                return None
            return again if self._highest(rank, again) <= self._most[rank] + _SLACK else None
        return None

    def _kept(self, again: Pass) -> Pass:
        if again not in self._inputs:
            (self._inputs[again],) = self._schedule.predecessors(again)
        return self._inputs[again]

    def _ready(self, rank: int) -> float:
        """Return when the inputs of the rank's next pass are there; infinite: not known yet."""
        ends = self._ends
        return max((ends.get(q, inf) + edge for q, edge in self._needs(rank)), default=0.0)

    def _earliest(self, rank: int) -> float:
        """Return a time before which the next pass cannot start."""
        times = [0.0]
        for q, edge in self._needs(rank):
            end = self._ends.get(q, inf)
            if end == inf:
                other = self._schedule.rank_of(q)
                begin = max(self._clocks[other], self._clocks[rank])
                end = begin + self._length(q, other)
            times.append(end + edge)
        return max(times)

    def _length(self, p: Pass, rank: int) -> float:
        """Return for how long the rank computes; a copy runs beside."""
        if p.kind in self._beside:
            return 0.0
        key = p.kind, p.stage, rank, p.slice
        if key not in self._lengths:
            self._lengths[key] = self._costs.duration(self._schedule.graph, *key)
        return self._lengths[key]

    def _needs(self, rank: int) -> tuple[tuple[Pass, float], ...]:
        p = self._left[rank][0]
        if p not in self._known:
            self._known[p] = tuple(
                (q, self._costs.edge(self._schedule.rank_of(q), rank, (q.stage, p.stage)))
                for q in self._schedule.predecessors(p)
            )
        return self._known[p]

    def _rest(self, rank: int) -> Iterator[Pass]:
        yield from self._orders[rank]
        for p in self._left[rank]:
            again = self._again(p)
            if again is not None:
                yield again
            yield p

    def _highest(self, rank: int, first: Pass | None = None) -> float:
        """Return the most that is held from now on, up to the backward of `first`."""
        held = most = self._held[rank] + (self._changed(first) if first else 0.0)
        for p in self._left[rank]:
            again = self._again(p)
            if again is not None and again == first:
                break
            for each in (again, p) if again else (p,):
                held += self._changed(each)
                most = max(most, held)
        return most

    def _changed(self, p: Pass) -> float:
        return self._change.get((p.kind, p.stage, p.slice), 0.0)


def merak(num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Shifted critical path: the last rank recomputes nothing, so the rank before it sets the pace.

    Lai et al., Merak, arXiv 2206.04959 (TPDS 2023). What could be known of it is its abstract and
    what others say of it; what follows is this library's reading, and the formulas are its own. A
    forward of the last rank has its backward right behind it, so that running it again is in vain.
    Without that the last rank is the lightest, and the critical path is the one before it. All
    ranks but the last run one forward more ahead than 1F1B, so that R of a microbatch is done when
    its gradient arrives.

        >>> print(grid(merak(3, 4), width=76))
        rank 0   0F0   0F1   0F2   0F3   0R0   0BW0  0R1   0BW1  0R2   0BW2  0R3…
        rank 1   1F0   1F1   1F2   1R0   1BW0  1F3   1R1   1BW1  1R2   1BW2  1R3…
        rank 2   2F0   2BW0  2F1   2BW1  2F2   2BW2  2F3   2BW3

    - Bubble: (p-2)(F+B+W) beside the mF of the forwards that run again: p-1 ranks of 1F1B. With R
      right before each backward, `1f1b` with `--recompute all` has F more.
    - Peak memory: one activation, and the inputs of p-s+1 microbatches on rank s.
    """
    p, m = num_ranks, num_microbatches
    placement = Placement.loop(p)
    table = [(m, 'F BW', 'steady'), (m, 'BW', 'cool-down')]
    ahead = [p - rank for rank in range(p - 1)] + [0]
    orders = (phases([rank], m, [(ahead[rank], 'F', 'warm-up'), *table]) for rank in range(p))
    plain = Schedule.of('merak', placement, m, orders)
    return with_recomputation(plain, range(p - 1), costs or Costs.uniform(placement))


def varuna(num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Varuna's order: a backward first, R so that it ends as the gradient comes, else a forward.

    Athlur et al., Varuna, arXiv 2111.04007 (EuroSys 2022). The order is found once, by running the
    rules against the clock: a backward whose inputs are there comes first; R starts so that it ends
    when the gradient arrives, and its backward follows it; until then forwards run. No bound
    but m limits forwards ahead, which keep their input only, so a rank whose gradient is late has
    forwards to run where 1F1B waits. The last rank recomputes nothing. At run time the order stays:
    Varuna may also leave it when an input is late, which would change the order of messages.

        >>> print(grid(varuna(3, 4), width=76))
        rank 0   0F0   0F1   0F2   0F3   0R0   0BW0  0R1   0BW1  0R2   0BW2  0R3…
        rank 1   1F0   1F1   1F2   1R0   1BW0  1R1   1BW1  1R2   1BW2  1F3   1R3…
        rank 2   2F0   2BW0  2F1   2BW1  2F2   2BW2  2F3   2BW3

    - Bubble: at most (p-1)(F+B+W), beside the mF of the forwards that run again.
    - Peak memory: one activation, and the inputs of up to m microbatches.
    """
    p, m = num_ranks, num_microbatches
    graph = recompute(chain(p), range(p - 1))
    draft = Draft(Placement.loop(p), m, costs, graph)
    ranks = [_Rank(draft, rank) for rank in range(p)]
    moments = [each.next(ranks) for each in ranks]
    while min(moments)[0] < inf:
        start, _, rank, chosen = min(moments)
        ranks[rank].put(chosen, start)
        for each in ranks[max(0, rank - 1) : rank + 2]:
            moments[each.rank] = each.next(ranks)
    return draft.schedule('varuna')


_Moment = tuple[float, int, int, Pass]  # start, preference, rank, and what starts


@dataclass
class _Rank:
    """A rank while the order is made."""

    draft: Draft  # of all ranks
    rank: int

    def __post_init__(self) -> None:
        self.done = {F: 0, R: 0, BW: 0}  # passes that have been put
        self.ends: list[float] = []  # of the backwards

    def put(self, chosen: Pass, start: float) -> None:
        """Run a pass from `start` on."""
        end = self.draft.put(chosen, not_before=start)
        self.done[chosen.kind] += 1
        if chosen.kind == BW:
            self.ends.append(end)

    def next(self, ranks: list[_Rank]) -> _Moment:
        now, draft = self.draft.clock[self.rank], self.draft
        backward = Pass(BW, self.rank, self.done[BW])
        end = (inf, 0, self.rank, backward)
        if backward.microbatch == draft.num_microbatches:
            return end
        if (arrival := draft.arrival(backward)) < inf:
            return max(now, arrival), 0, self.rank, backward
        return min([end, *self._again(ranks, now), *self._forward(now)])

    def _again(self, ranks: list[_Rank], now: float) -> list[_Moment]:
        """Return R of the next backward, if its gradient is on its way."""
        at = self.done[BW]
        if self.rank == len(ranks) - 1 or len(ranks[self.rank + 1].ends) <= at:
            return []
        below = self.rank + 1
        edge = self.draft.costs.edge(below, self.rank, (below, self.rank))
        there = ranks[below].ends[at] + edge
        start = max(now, there - self.draft.duration(R, self.rank))
        return [(start, 0, self.rank, Pass(R, self.rank, at))]

    def _forward(self, now: float) -> list[_Moment]:
        at = self.done[F]
        if at == self.draft.num_microbatches:
            return []
        forward = Pass(F, self.rank, at)
        return [(max(now, self.draft.arrival(forward)), 1, self.rank, forward)]


def _lacks(costs: Costs) -> str | None:
    if lack := lack_of_times(costs, (R,)):
        return lack
    if 'input' not in costs.amounts:
        return (
            'costs do not say what the input of a stage takes, which is kept: give a file with '
            '"amounts": {"input": [...]}'
        )
    return None


def _way(costs: Costs, stage: int, life: Life) -> Way:
    """Return its needs: the input is held until it runs again, and from then on all of it."""
    again = costs.time(Task(R, stage)) / life.speed
    before = 0.0
    if life.stays:  # the input is there all the time
        kept = min(costs.amount('input', Task(F, stage)), life.held)
        before = kept * max(0.0, life.there - again - life.backward)
    return Way(again, 0.0, before + life.held * min(life.there, again + life.backward))


TECHNIQUE = Technique(
    'recompute',
    'made again before B',
    graph=recompute,
    place=lambda schedule, stages, costs, _: with_recomputation(schedule, stages, costs),
    request=recomputed,
    lacks=_lacks,
    way=_way,
)
