"""Patterns: a microbatch's passes at fixed offsets, repeated; and the schedule that follows one.

The idea of the building block (Qi et al., arXiv 2405.15362) without its rigid grid: a pattern says
when each queue would like to run microbatch 0, and how much later each next one. `dispatch` then
runs the ranks event by event with the true times: whenever a rank is free, it starts the pass that
is due first of those that may start. So one pattern of a few numbers makes a schedule of any
length, with its own warm-up and cool-down, whatever the times are.

A forward takes memory that only its microbatch's last pass returns, so tight limits can deadlock.
`dispatch` starts one only if, after it, the microbatches in flight can still be finished one after
the other, oldest first (the banker's algorithm; local to each rank, as passes hold no memory of
another). Where a B raises what is held, it waits for Ws to make room, and forwards leave that room
beside all that has no B yet. Hence every limit that holds one microbatch of all of a rank's stages,
and the raise of its B, is enough. In other graphs the same is asked before all that takes memory,
pass by pass of each microbatch in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, chain, product
from math import inf
from random import Random
from typing import Any

from megatron_zbpp.ir import B, F, Schedule, W
from megatron_zbpp.planner.ends import latest, replay
from megatron_zbpp.planner.limits import OnTime, always
from megatron_zbpp.planner.problem import SEVERAL, Ends, Orders, Problem
from megatron_zbpp.schedules.construct.phases import split_one_forward_one_backward

_SLOPES = (1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
_TURNS = (0.0, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
_DELAYS = (0.0, 0.3, 1.0, 1.0, 2.0, 3.0)
_INTERVALS = (0.9, 1.0, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4)
_LEADS = (0.0, 0.0, 0.0, 0.3, 0.6, 1.0, 2.0, inf, inf)
_FIELDS = ('down', 'up', 'turn', 'delay', 'interval', 'lead', 'patience', 'nudges', 'nudges')
_PATIENCE = (0.0, 0.0, 0.2, 0.3, 0.5, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Pattern:
    """Due times of passes, in units of the busiest rank's work for one microbatch."""

    down: tuple[float, ...]  # per chunk, stage to stage time of F, as a multiple of F and its edge
    up: tuple[float, ...]  # the same of B
    turn: float  # from the last stage's F to its B
    delay: float  # from a B to its W
    interval: float  # from one microbatch to the next
    lead: float  # how long before it is due an F may start; others may at any time
    # share of a pass's time for which its rank rather waits for one that is due before
    patience: float
    nudges: tuple[float, ...]  # added to the time of each queue

    @classmethod
    def random(cls, problem: Problem, rng: Random) -> Pattern:
        """Return a random pattern."""
        chunks = range(problem.placement.num_chunks)
        return cls(
            down=tuple(rng.choice(_SLOPES) for _ in chunks),
            up=tuple(rng.choice(_SLOPES) for _ in chunks),
            turn=rng.choice(_TURNS),
            delay=rng.choice(_DELAYS),
            interval=rng.choice(_INTERVALS),
            lead=rng.choice(_LEADS),
            patience=rng.choice(_PATIENCE),
            nudges=(0.0,) * problem.num_queues,
        )

    @classmethod
    def straight(cls, problem: Problem, turn: float, delay: float, lead: float) -> Pattern:
        """Return the pattern in which passes follow each other at once."""
        each = (1.0,) * problem.placement.num_chunks
        return cls(each, each, turn, delay, 1.0, lead, 0.0, (0.0,) * problem.num_queues)

    def mutated(self, rng: Random) -> Pattern:
        """Return a pattern that differs a little in one to three places."""
        pattern = self
        for _ in range(rng.choice((1, 1, 2, 3))):
            field = rng.choice(_FIELDS)
            pattern = replace(pattern, **{field: _mutated(getattr(pattern, field), field, rng)})
        return pattern

    def due(self, problem: Problem) -> tuple[list[float], float]:
        """Return when each queue's microbatch 0 is due, and the interval, in the problem's time."""
        unit = max(problem.work) / problem.num_microbatches
        lengths, tasks, chunk_of = problem.durations, problem.tasks, problem.placement.chunk_of
        due = [0.0] * problem.num_queues
        for queue in problem.in_turn:
            kind, stage, _ = tasks[queue]
            time = 0.0
            for need, edge in problem.inputs[queue]:
                between = tasks[need].kind + kind
                if between == F + F:
                    step = self.down[chunk_of(stage)] * (lengths[need] + edge)
                elif between == B + B:
                    up = self.up[chunk_of(tasks[need].stage)]
                    step = up * (lengths[need] + problem.edges[need])
                elif between == F + B:
                    step = self.turn * unit
                elif between == B + W:
                    step = self.delay * unit
                else:
                    step = lengths[need] + edge
                time = max(time, due[need] + step)
            due[queue] = time
        nudged = [time + nudge * unit for time, nudge in zip(due, self.nudges, strict=True)]
        return nudged, self.interval * unit


def _mutated(value: Any, field: str, rng: Random) -> float | tuple[float, ...]:
    if field == 'patience':
        return rng.choice(_PATIENCE)
    if field == 'interval':
        return value * rng.gauss(1, 0.03)
    if value == inf:
        return rng.choice(_LEADS)
    if field in ('turn', 'delay', 'lead'):
        return max(0.0, value + rng.gauss(0, 0.2) * max(value, 0.3))
    values = list(value)
    for _ in range(rng.choice((1, 1, 2, 4)) if field == 'nudges' else 1):
        at = rng.randrange(len(values))
        if field == 'nudges':
            values[at] += rng.gauss(0, 0.25)
        else:
            values[at] = max(0.5, values[at] * rng.gauss(1, 0.15))
    return tuple(values)


def dispatch(problem: Problem, pattern: Pattern) -> Orders:
    """Return the orders in which ranks run when they follow `pattern`, within the limits."""
    unit = max(problem.work) / problem.num_microbatches
    due, interval = pattern.due(problem)
    lead = pattern.lead * unit
    durations, needs, edges = problem.durations, problem.needs, problem.edges
    inputs, m = problem.awaited, problem.num_microbatches
    leads = [lead if task.kind == F else inf for task in problem.tasks]
    whole = problem.is_plain and problem.slices == 1
    guards: list[_Guard | None] = []
    for queue, task in enumerate(problem.tasks):
        takes = max(problem.steps[queue]) > 0
        fits = _safe if whole and task.kind == F else _fits if whole else _can_finish
        limited = problem.caps[problem.ranks[queue]] < inf and (takes or fits is _safe)
        guards.append(fits if limited else None)
    ends: Ends = [[] for _ in due]
    held = [0] * problem.placement.num_ranks

    def choose(rank: int, now: float) -> tuple[int, float]:
        """Return the queue that `rank` starts now; or -1, and when one may start."""
        best, first = -1, inf
        awaited, soon = inf, inf
        for queue in problem.queues[rank]:
            microbatch, need = len(ends[queue]), needs[queue]
            if microbatch >= m or (need >= 0 and len(ends[need]) <= microbatch):
                continue
            start = ends[need][microbatch] + edges[queue] if need >= 0 else 0.0
            if need == SEVERAL:
                start = latest(inputs[queue], microbatch, ends)
                if start == inf:
                    continue
            time = due[queue] + microbatch * interval
            start = max(start, time - leads[queue])
            if time >= (first if start <= now else awaited):
                continue
            guard = guards[queue]
            if guard is not None and not guard(problem, rank, queue, held[rank], ends):
                continue
            if start <= now:
                best, first = queue, time
            else:
                awaited, soon = time, start
        if awaited < first and soon < now + pattern.patience * durations[best]:
            return -1, soon
        return best, soon

    return _run(problem, choose, ends, held)


def _run(
    problem: Problem, choose: Callable[[int, float], tuple[int, float]], ends: Ends, held: list[int]
) -> Orders:
    """Run the ranks event by event, each free one as `choose` says; fill `ends` and `held`."""
    orders: Orders = [[] for _ in held]
    busy = [0.0] * len(held)
    events = [(0.0, rank) for rank in range(len(held))]
    while events:
        now, rank = heappop(events)
        if busy[rank] > now:
            continue
        queue, soon = choose(rank, now)
        if queue < 0:
            if soon < inf:
                heappush(events, (soon, rank))
            continue
        at = len(ends[queue]) % problem.slices
        end = busy[rank] = now + problem.times[queue][at]
        ends[queue].append(end)
        orders[rank].append(queue)
        held[rank] += problem.steps[queue][at]
        heappush(events, (end, rank))
        for other, edge in problem.wakes[queue]:
            heappush(events, (end + edge, other))
    if any(len(own) < problem.num_microbatches for own in ends):
        raise ValueError(f'limits {problem.limits} end in a deadlock: raise them')
    return orders


_Guard = Callable[[Problem, int, int, int, Ends], bool]


def _fits(problem: Problem, rank: int, queue: int, held: int, ends: Ends) -> bool:
    return held + problem.changes[queue] <= problem.caps[rank]


def _can_finish(problem: Problem, rank: int, queue: int, held: int, ends: Ends) -> bool:
    own, steps, slices = problem.turns[rank], problem.steps, problem.slices
    free = problem.caps[rank] - held - steps[queue][len(ends[queue]) % slices]
    done = [len(ends[q]) + (q == queue) for q in own]
    for first in range(min(done) // slices * slices, max(done), slices):
        left = (steps[q][max(at - first, 0) :] for q, at in zip(own, done, strict=True))
        todo = list(accumulate(chain.from_iterable(left), initial=0))
        if max(todo) > free:
            return False
        free -= todo[-1]
    return True


def _safe(problem: Problem, rank: int, queue: int, held: int, ends: Ends) -> bool:
    cap, changes = problem.caps[rank], problem.changes
    own, rise = problem.stage_queues[rank], problem.raises[rank]
    if held + changes[queue] > cap:
        return False
    if rise:  # what waits for a backward needs room for its rise
        waiting = sum(changes[f] * (len(ends[f]) - len(ends[b])) for f, b in own)
        if waiting + changes[queue] + rise > cap:
            return False
    last, _ = own[-1]
    if queue == last:
        return True
    oldest, needed = len(ends[last]), rise
    for forward, _ in own:
        needed += changes[forward] * max(len(ends[forward]) + (forward == queue) - oldest, 1)
    return needed <= cap


_AHEAD = (1.0, 1.5)
_DEFER = (0.0, 0.5, 1.0, 1.5)
_KEPT = 3


_Grouping = tuple[int, float, float]
"""The size of the largest group, further forwards in the warm-up for each rank below, and Bs
without a W for each rank above."""


def grouped(problem: Problem, on_time: OnTime = always) -> list[Orders]:
    """Return the best few of the family within the limits; none but on a loop of several chunks."""
    placement = problem.placement
    if placement.num_chunks < 2 or not placement.is_loop or not problem.is_plain:
        return []
    few = problem.with_fewer_microbatches
    ranked = sorted(_values(few, on_time), key=lambda entry: entry[0])
    return [_in_groups(problem, grouping) for _, grouping in ranked[:_KEPT] if on_time()]


def _values(problem: Problem, on_time: OnTime) -> Iterator[tuple[float, _Grouping]]:
    p = problem.placement.num_ranks
    for grouping in product(range((p + 1) // 2, p + 1), _AHEAD, _DEFER):
        if not on_time():
            return
        orders = _in_groups(problem, grouping)
        result = replay(problem, orders) if problem.fits(orders) else None
        if result is not None:
            yield result[0], grouping


def _in_groups(problem: Problem, grouping: _Grouping) -> Orders:
    (size, ahead, defer), placement = grouping, problem.placement
    m, below = problem.num_microbatches, placement.num_ranks - 1
    count = -(-m // size)
    groups = [m // count + (i < m % count) for i in range(count)]
    passes = (
        split_one_forward_one_backward(
            placement.stages(rank),
            groups,
            ahead=int(ahead * (below - rank)) + problem.slices - 1,
            defer=int(defer * rank),
        )
        for rank in range(placement.num_ranks)
    )
    return problem.orders(Schedule.of('grouped', placement, m, passes))
