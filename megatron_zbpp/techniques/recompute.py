"""Forwards that run again (Chen et al., arXiv 1604.06174; GPipe, arXiv 1811.06965).

`recompute` makes R, a forward again, before B of a graph: forwards keep their input only. In orders
R is right before its B, where it waits for nothing but the rank. It comes earlier where the rank
would idle: as long as the whole of it fits there, and nothing more is held than otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

from megatron_zbpp.analysis.memory import lifetimes
from megatron_zbpp.ir import BW, B, F, Pass, Placement, Schedule, Task, chain
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import DEVICE, Graph, Hold, Kind, R, compiled
from megatron_zbpp.ir.machine import Machine
from megatron_zbpp.ir.techniques import instead, known_stages, made_of
from megatron_zbpp.schedules.construct.draft import Draft
from megatron_zbpp.schedules.construct.phases import phases
from megatron_zbpp.techniques import Amount, chunks_of
from megatron_zbpp.techniques.base import Life, Technique, Way, lack_of_times
from megatron_zbpp.techniques.composition import require_goes_with


def recompute(graph: Graph, stages: Iterable[int]) -> Graph:
    """Make forwards of `stages` keep their input only; R makes the activation again, before B.

    (Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; per stage as in
    GPipe, arXiv 1811.06965, section 2.3.)
    """
    stages = known_stages(graph, stages)
    needs, holds = dict(graph.needs), dict(graph.holds)
    for task in [t for t in graph.needs if t.kind == F and t.stage in stages]:
        again, backward = task._replace(kind=R), task._replace(kind=B)
        # its own forward, or what brings back what that has left
        (kept,) = (n for n in needs[backward] if n.task.stage == task.stage and n.task.kind != B)
        needs[again] = (kept,)
        needs[backward] = instead(needs[backward], kept.task, again)
        if again in graph.needs:
            raise ValueError(f'stage {task.stage} is recomputed already: name it once')
        holds[again] = (Hold(DEVICE, 'input', -1), Hold(DEVICE, 'activation', 1))
        for other in _between(graph, task, kept.task):
            holds[other] = tuple(
                hold._replace(amount='input') if hold.amount == 'activation' else hold
                for hold in graph.holds[other]
            )
    return made_of(
        graph, 'recompute', (stages,), needs, holds, {R: Kind('recomputation', in_order=False)}
    )


def _between(graph: Graph, first: Task, last: Task) -> Iterator[Task]:
    yield last
    if last != first:
        yield from _between(graph, first, graph.needs[last][0].task)


_SLACK = 1e-9


def recomputed(schedule: Schedule, amount: Amount, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with forwards of the first chunks of each rank run again before B.

    Chunks live the longer the earlier they are. A stage whose B follow their F at once has nothing
    to gain and keeps what it saves. (Chen et al., arXiv 1604.06174; GPipe, arXiv 1811.06965.) What
    the schedule keeps on partners (BPipe) is then the input of what runs again. Copies to the host
    it cannot have: they were given times without R.
    """
    require_goes_with(schedule, recompute.__name__)
    placement = schedule.placement
    chunks = chunks_of(amount, placement.num_chunks, 'recompute')
    stages = [s for s in range(placement.num_stages) if placement.chunk_of(s) < chunks]
    found = with_recomputation(schedule, stages, costs or Costs.uniform(placement))
    return replace(found, name=f'{schedule.name} + recompute {amount}')


def with_recomputation(schedule: Schedule, stages: Iterable[int], costs: Costs) -> Schedule:
    """Return `schedule` with forwards of those of `stages` that gain by it run again before B."""
    waiting = {
        life.forward.stage
        for order in schedule.passes
        for life in lifetimes(order, range(schedule.num_stages))
        if life.last > life.first + 1
    }
    stages = [stage for stage in stages if stage in waiting]
    plain = replace(schedule, graph=recompute(schedule.graph, stages))
    return plain.reordered(_Filling(plain, frozenset(stages), costs).orders(), plain.graph)


class _Filling:
    """Runs the passes of all ranks in time, and puts each R where its rank would idle."""

    def __init__(self, schedule: Schedule, stages: frozenset[int], costs: Costs) -> None:
        # the graph of the schedule has R of `stages`, its orders have none
        self._schedule, self._stages, self._costs = schedule, stages, costs
        # a copy runs beside what computes
        beside = compiled(schedule.graph).on_copy_engines & costs.times.keys()
        at_once = costs.with_times(**{kind: (0.0,) * len(costs.times[kind]) for kind in beside})
        self._machine = Machine.of(schedule, at_once)
        self._left = [list(order) for order in schedule.passes]
        self._orders: list[list[Pass]] = [[] for _ in schedule.passes]
        self._clocks = [0.0] * len(self._left)
        self._ends: dict[Pass, float] = {}
        self._inputs: dict[Pass, tuple[tuple[Pass, float], ...]] = {}
        self._backward = frozenset(schedule.graph.doers[B])
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
        free, p = self._clocks[rank], self._left[rank][0]
        ready = self._machine.arrival(p)
        if self._again(p) or (free < ready and self._filler(rank)):
            return free
        return max(free, ready)

    def _step(self, rank: int) -> None:
        p, clock = self._left[rank][0], self._clocks[rank]
        again, ready = self._again(p), self._machine.arrival(p)
        if again is None and clock < ready:
            again = self._filler(rank)
        if again is None:
            self._left[rank].pop(0)
        chosen = again or p
        self._orders[rank].append(chosen)
        self._held[rank] += self._changed(chosen)
        end = self._machine.run(chosen, clock if again else max(ready, clock))
        self._clocks[rank] = self._ends[chosen] = end

    def _again(self, p: Pass) -> Pass | None:
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
            if p._replace(kind=F) not in self._ends or self._machine.arrival(again) == inf:
                return None
            if self._clocks[rank] + self._length(again) > self._earliest(rank) + _SLACK:
                return None
            return again if self._highest(rank, again) <= self._most[rank] + _SLACK else None
        return None

    def _earliest(self, rank: int) -> float:
        p, rank_of = self._left[rank][0], self._schedule.rank_of
        if p not in self._inputs:
            self._inputs[p] = tuple(
                (q, self._costs.edge(rank_of(q), rank, (q.stage, p.stage)))
                for q in self._schedule.predecessors(p)
            )
        times = [0.0]
        for q, edge in self._inputs[p]:
            end = self._ends.get(q, inf)
            if end == inf:
                begin = max(self._clocks[rank_of(q)], self._clocks[rank])
                end = begin + self._length(q)
            times.append(end + edge)
        return max(times)

    def _length(self, p: Pass) -> float:
        return self._machine.timing(p)[-1]

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
    ends: list[list[float]] = [[] for _ in range(p)]  # of backwards
    done = [{F: 0, R: 0, BW: 0} for _ in range(p)]

    def coming(rank: int) -> tuple[float, int, int, Pass]:
        """Return start, preference and rank of what a rank runs next, and that pass."""
        now, at = draft.clock[rank], done[rank][BW]
        backward = Pass(BW, rank, at)
        if at == m:
            return inf, 0, rank, backward
        if (arrival := draft.arrival(backward)) < inf:
            return max(now, arrival), 0, rank, backward
        moments = [(inf, 0, rank, backward)]
        if rank < p - 1 and len(ends[rank + 1]) > at:  # the gradient is on its way
            there = ends[rank + 1][at] + draft.costs.edge(rank + 1, rank, (rank + 1, rank))
            start = max(now, there - draft.duration(R, rank))
            moments.append((start, 0, rank, Pass(R, rank, at)))
        if done[rank][F] < m:
            forward = Pass(F, rank, done[rank][F])
            moments.append((max(now, draft.arrival(forward)), 1, rank, forward))
        return min(moments)

    moments = [coming(rank) for rank in range(p)]
    while min(moments)[0] < inf:
        start, _, rank, chosen = min(moments)
        end = draft.put(chosen, not_before=start)
        done[rank][chosen.kind] += 1
        ends[rank] += [end] if chosen.kind == BW else []
        for other in range(max(0, rank - 1), min(p, rank + 2)):
            moments[other] = coming(other)
    return draft.schedule('varuna')


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
