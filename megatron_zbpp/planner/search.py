"""The search on one placement: patterns that are climbed, then orders that are annealed.

Patterns (`pattern`) find what a whole schedule should look like, at a few milliseconds a try;
annealing (`anneal`) finds the last percents in its details. Both are restarted from the best that
is known, schedules handed in from outside included, and nothing known is ever lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import inf
from random import Random

from megatron_zbpp.planner.annealing import Solution, anneal, fold, plain
from megatron_zbpp.planner.budget import Budget, OnTime, always
from megatron_zbpp.planner.ends import replay, replay_whole
from megatron_zbpp.planner.lower_bounds import lower_bound
from megatron_zbpp.planner.pattern import Pattern, dispatch
from megatron_zbpp.planner.problem import EPSILON, Ends, Orders, Problem

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
        """Begin with the best of `starts`.

        Args:
            problem: with limits that hold one microbatch.
            starts: orders within the limits, to start from.
            seed: the same seed and budget find the same.
            on_time: asked before a random order is tried, too.
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
        for done in range(_ROUNDS):
            if self.done or not budget.on_time():
                return
            self._anneal(budget.split_off(1 / (_ROUNDS - done)), min(done, len(self.solutions) - 1))

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
            if budget.on_time():
                self._follow(pattern, budget.on_time)

    def _follow(self, pattern: Pattern, on_time: OnTime) -> None:
        """Make the schedule of a pattern known, and the one that repeats its steady state."""
        self.add(dispatch(self.problem, pattern))
        if self._few is not self.problem:
            orders = dispatch(self._few, pattern)
            extended = extrapolate(self._few, orders, self.problem, on_time)
            if extended is not None:
                self.add(extended.orders)

    def _anneal(self, budget: Budget, start: int) -> None:
        """Anneal the known solution number `start`, now and then with repetitions folded."""
        orders, rng = self.solutions[start].orders, self._rng
        beats = rng.choice((0, 0, 1) if self._few is self.problem else (0, 1, 1, 2))
        folded = [
            fold(order, beats * len(queues)) if beats else plain(order)
            for order, queues in zip(orders, self.problem.queues, strict=True)
        ]
        temperature = rng.choice(_TEMPERATURES) * self._unit
        self._keep(anneal(self.problem, folded, rng, budget, temperature, self.bound + EPSILON))
