"""The search on one placement: patterns that are climbed, then orders that are annealed.

Patterns (`pattern`) find what a whole schedule should look like, at a few milliseconds a try;
annealing finds the last percents in its details. Both are restarted from the best that is known,
schedules handed in from outside included, and nothing known is ever lost.

Annealing moves one pass, replays, keeps the move or takes it back. Most moves touch the critical
path, the chain of passes that sets the value, since no other can improve it. A value above what the
temperature allows ends its replay early. Orders of many microbatches repeat themselves in the
middle: `fold` finds what repeats, and a move inside that is made in every copy at once, so a
thousand microbatches take no more moves than fifty.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log
from random import Random

from megatron_zbpp.planner import cp_sat
from megatron_zbpp.planner.ends import last_of, lower_bound, replay, replay_whole
from megatron_zbpp.planner.limits import Budget, OnTime, always
from megatron_zbpp.planner.pattern import Pattern, dispatch
from megatron_zbpp.planner.problem import EPSILON, Ends, Orders, Problem

_CRITICAL = 0.8  # share of moves that start on the critical path
_STALE = 20  # moves after which the critical path is traced anew


@dataclass(frozen=True)
class Solution:
    """Orders and the value that they have."""

    value: float
    orders: Orders


@dataclass
class Folded:
    """The order of one rank as `head + copies * body + tail`."""

    head: list[int]
    body: list[int]
    copies: int
    tail: list[int]

    def unfold(self) -> list[int]:
        return self.head + self.body * self.copies + self.tail

    def locate(self, position: int) -> tuple[list[int], int, int]:
        """Return the part that holds this position, the position in it, and the part's start."""
        start, repeated = len(self.head), len(self.body) * self.copies
        if position < start:
            return self.head, position, 0
        if position < start + repeated:
            return self.body, (position - start) % len(self.body), start
        return self.tail, position - start - repeated, start + repeated


def plain(order: list[int]) -> Folded:
    """Return the order as it is, nothing repeated."""
    return Folded(list(order), [], 0, [])


def fold(order: list[int], period: int) -> Folded:
    """Return the order with its longest repetition of `period` passes folded."""
    best = run = end = 0
    for position in range(period, len(order)):
        run = run + 1 if order[position] == order[position - period] else 0
        if run > best:
            best, end = run, position + 1
    copies = best // period + 1
    if copies < 3:
        return plain(order)
    first = end - copies * period
    return Folded(order[:first], order[first : first + period], copies, order[end:])


def anneal(
    problem: Problem,
    folded: list[Folded],
    rng: Random,
    budget: Budget,
    temperature: float,
    enough: float,
) -> Solution:
    """Return the best orders met while `temperature` falls to 0, never worse than the given ones.

    `folded` is changed in place, to where the annealing ends. The budget is spent to its end,
    unless `enough` is reached. `temperature` is of the start: how much worse a move may make the
    value.
    """
    orders = [part.unfold() for part in folded]
    value, ends = replay_whole(problem, orders)
    best = Solution(value, [list(order) for order in orders])
    cost = 6 + problem.num_steps / 20
    path, stale = critical(problem, orders, ends), 0
    while best.value > enough and budget.charge(cost):
        if rng.random() < _CRITICAL:
            rank, position = path[int(rng.random() * len(path))]
        else:
            rank = int(rng.random() * len(orders))
            position = int(rng.random() * len(orders[rank]))
        part, at, base = folded[rank].locate(position)
        moved = _move(part, at, rng)
        if moved is None:
            continue
        first, before = moved
        old, orders[rank] = orders[rank], folded[rank].unfold()
        allowed = value - temperature * (1 - budget.spent) * log(1 - rng.random())
        result: tuple[float, Ends] | None = None
        if problem.fits_rank(rank, orders[rank]):
            result = replay(problem, orders, ends, rank, base + first, allowed)
        if result is None:
            part[first : first + len(before)] = before
            orders[rank] = old
            continue
        (value, ends), stale = result, stale + 1
        if value < best.value - EPSILON:
            best, stale = Solution(value, [list(order) for order in orders]), _STALE
        if stale >= _STALE:
            path, stale = critical(problem, orders, ends), 0
    return best


def _move(part: list[int], at: int, rng: Random) -> tuple[int, list[int]] | None:
    distance = 1 + int(rng.expovariate(0.6))
    to = at + distance if rng.random() < 0.5 else at - distance
    if not 0 <= to < len(part):
        return None
    first, last = min(at, to), max(at, to)
    before = part[first : last + 1]
    part.insert(to, part.pop(at))
    return None if part[first : last + 1] == before else (first, before)


def critical(problem: Problem, orders: Orders, ends: Ends) -> list[tuple[int, int]]:
    """Return (rank, position) of the passes that set the value, last to first, by who waits."""
    m = problem.num_microbatches
    finishes = [
        max(ends[queue][m - 1] for queue in queues) - origin
        for queues, origin in zip(problem.queues, problem.origins, strict=True)
    ]
    rank = finishes.index(max(finishes))
    path: list[tuple[int, int]] = []
    positions: dict[int, list[int]] = {}
    position = len(orders[rank]) - 1
    queue, microbatch = orders[rank][position], m - 1
    while True:
        path.append((rank, position))
        times = problem.times[queue]
        start = ends[queue][microbatch] - times[microbatch % len(times)]
        if position:
            before = orders[rank][position - 1]
            count = orders[rank][:position].count(before)
            if ends[before][count - 1] > start - EPSILON:
                queue, microbatch, position = before, count - 1, position - 1
                continue
        awaited = problem.awaited[queue]
        if not awaited or start <= EPSILON:
            return path
        arrivals = [
            (ends[need][last_of(microbatch, group)] + edge, need, last_of(microbatch, group))
            for need, edge, group in awaited
        ]
        _, queue, microbatch = max(arrivals, key=lambda each: each[0])
        rank = problem.ranks[queue]
        if queue not in positions:
            positions[queue] = [i for i, other in enumerate(orders[rank]) if other == queue]
        position = positions[queue][microbatch]


_BEATS = (1, 2)  # microbatches in one repetition
_PLACES = range(10, 95, 3)  # where to repeat, in percent of the time


def extrapolate(
    few: Problem, orders: Orders, many: Problem, on_time: OnTime = always
) -> Solution | None:
    """Return the best orders of `many` that repeat a part of `orders`; None if none can be."""
    added = many.num_microbatches - few.num_microbatches
    result = replay(few, orders)
    best = None
    for beat in _BEATS:
        if result is None or added % beat:
            continue
        for cut in _cuts(few, orders, result[1], beat):
            if not on_time():
                return best
            longer = [
                order[:at] + order[at : at + len(queues) * beat] * (added // beat) + order[at:]
                for at, order, queues in zip(cut, orders, few.queues, strict=True)
            ]
            extended = replay(many, longer, cap=inf if best is None else best.value)
            if extended is not None and (best is None or extended[0] < best.value):
                best = Solution(extended[0], longer)
    return best


def _cuts(problem: Problem, orders: Orders, ends: Ends, beat: int) -> list[tuple[int, ...]]:
    """Yield, per rank, where a repeatable part starts: all at about one time, for many times."""
    balanced = [
        _balanced(order, len(queues), beat)
        for order, queues in zip(orders, problem.queues, strict=True)
    ]
    if not all(balanced):
        return []
    times = [sorted(end for queue in queues for end in ends[queue]) for queues in problem.queues]
    last = max(own[-1] for own in times)
    cuts = {
        tuple(
            _nearest(starts, bisect_left(own, last * percent / 100))
            for starts, own in zip(balanced, times, strict=True)
        ): None
        for percent in _PLACES
    }
    return list(cuts)


def _balanced(order: list[int], num_queues: int, beat: int) -> list[int]:
    length = num_queues * beat
    counts = dict.fromkeys(order, 0)
    exact = 0
    starts: list[int] = []
    for position, queue in enumerate(order):
        exact += (counts[queue] + 1 == beat) - (counts[queue] == beat)
        counts[queue] += 1
        if position >= length:
            gone = order[position - length]
            exact += (counts[gone] - 1 == beat) - (counts[gone] == beat)
            counts[gone] -= 1
        if position >= length - 1 and exact == num_queues:
            starts.append(position - length + 1)
    return starts


def _nearest(starts: list[int], position: int) -> int:
    at = bisect_left(starts, position)
    return min(starts[max(at - 1, 0) : at + 1], key=lambda start: abs(start - position))


_POOL = 8  # patterns that are climbed at once
_KEPT = 6  # solutions to restart from
_ROUNDS = 3  # annealings in one call of `improve`
_RANDOM = 0.3  # share of the first climb that only looks around
_TEMPERATURES = (0.05, 0.1, 0.1, 0.2)  # in units of the shortest pass


class Search:
    """The state of a search on one problem: the best order so far, and bounds."""

    def __init__(
        self, problem: Problem, starts: Iterable[Orders], seed: int, on_time: OnTime = always
    ) -> None:
        """Begin with the best of `starts`, orders within limits that hold one microbatch.

        The same seed and budget find the same. `on_time` is asked before a random order is tried.
        """
        self.problem = problem
        self.bound = lower_bound(problem)  # of its value; whoever knows better may raise it
        self.solutions: list[Solution] = []  # the best orders known, best first
        self._rng = Random(seed)
        self._pool: list[tuple[float, Pattern]] = []
        self._few = problem.with_fewer_microbatches
        self._unit = min((time for time in problem.durations if time > 0), default=0.0)
        for orders in starts:
            self.add(orders)
        if on_time():
            self.add(dispatch(problem, Pattern.random(problem, self._rng)))

    @property
    def best(self) -> Solution:
        return self.solutions[0]

    @property
    def done(self) -> bool:
        """True once the best is known to be the optimum."""
        return self.best.value <= self.bound + EPSILON

    def add(self, orders: Orders) -> None:
        """Make orders known; those that deadlock or exceed a limit are forgotten at once."""
        result = replay(self.problem, orders) if self.problem.fits(orders) else None
        if result is not None:
            self._keep(Solution(result[0], orders))

    def improve(self, budget: Budget) -> None:
        """Spend `budget` on better solutions; returns early with a proven optimum."""
        if not self.done:
            self._climb(budget.split_off(0.15 if self._pool else 0.4))
        rng = self._rng
        for done in range(_ROUNDS):
            if self.done or not budget.on_time():
                return
            part = budget.split_off(1 / (_ROUNDS - done))
            orders = self.solutions[min(done, len(self.solutions) - 1)].orders
            # now and then with repetitions folded
            beats = rng.choice((0, 0, 1) if self._few is self.problem else (0, 1, 1, 2))
            folded = [
                fold(order, beats * len(queues)) if beats else plain(order)
                for order, queues in zip(orders, self.problem.queues, strict=True)
            ]
            temperature = rng.choice(_TEMPERATURES) * self._unit
            enough = self.bound + EPSILON
            self._keep(anneal(self.problem, folded, rng, part, temperature, enough))

    def solve(self, enough: float, effort: float, seconds: float) -> cp_sat.Answer:
        """Ask the exact solver for orders below `enough`, or a proof that there are none."""
        answer = cp_sat.solve(self.problem, self.best.orders, self.bound, enough, effort, seconds)
        self.bound = max(self.bound, answer.bound)
        if answer.orders is not None:
            self.add(answer.orders)
        return answer

    def _keep(self, solution: Solution) -> None:
        if all(solution.orders != known.orders for known in self.solutions):
            self.solutions = sorted([*self.solutions, solution], key=lambda s: s.value)[:_KEPT]

    def _climb(self, budget: Budget) -> None:
        """Try random patterns, then changes of the best, and keep the schedules of these."""
        few, pool, rng = self._few, self._pool, self._rng
        explore = 0.0 if pool else _RANDOM
        while budget.charge(2 * few.num_steps):
            climb = len(pool) == _POOL and budget.spent > explore
            at = min(int(rng.expovariate(0.5)), _POOL - 1)
            pattern = pool[at][1].mutated(rng) if climb else Pattern.random(few, rng)
            value, _ = replay_whole(few, dispatch(few, pattern))
            if climb and value <= pool[at][0]:
                pool[at] = value, pattern
            elif not climb:
                pool.append((value, pattern))
            pool.sort(key=lambda entry: entry[0])
            del pool[_POOL:]
        for _, pattern in pool[:3]:
            if not budget.on_time():
                continue
            self.add(dispatch(self.problem, pattern))
            if few is not self.problem:  # what repeats its steady state, too
                orders = dispatch(few, pattern)
                extended = extrapolate(few, orders, self.problem, budget.on_time)
                if extended is not None:
                    self.add(extended.orders)
