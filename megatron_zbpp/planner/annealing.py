"""Simulated annealing on the orders of the ranks: move one pass, replay, keep it or take it back.

Most moves touch the critical path, the chain of passes that sets the value, since no other can
improve it. A value above what the temperature allows ends its replay early. Orders of many
microbatches repeat themselves in the middle: `fold` finds what repeats, and a move inside that is
made in every copy at once, so a thousand microbatches take no more moves than fifty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from random import Random

from megatron_zbpp.planner.budget import Budget
from megatron_zbpp.planner.ends import last_of, replay, replay_whole
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

    Args:
        problem: what the orders are for.
        folded: per rank; changed in place, to where the annealing ends.
        rng: decides every move.
        budget: spent to its end, unless `enough` is reached.
        temperature: of the start, in the unit of times: how much worse a move may make it.
        enough: a value at which to stop.
    """
    orders = [part.unfold() for part in folded]
    value, ends = replay_whole(problem, orders)
    best = Solution(value, [list(order) for order in orders])
    cost = 6 + problem.num_steps / 20
    path, stale = critical(problem, orders, ends), 0
    while best.value > enough and budget.charge(cost):
        rank, position = _pick(path, orders, rng)
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


def _pick(path: list[tuple[int, int]], orders: Orders, rng: Random) -> tuple[int, int]:
    """Return rank and position of the pass to move."""
    if rng.random() < _CRITICAL:
        return path[int(rng.random() * len(path))]
    rank = int(rng.random() * len(orders))
    return rank, int(rng.random() * len(orders[rank]))


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
    return list(_trace(problem, orders, ends, rank))


def _trace(problem: Problem, orders: Orders, ends: Ends, rank: int) -> Iterator[tuple[int, int]]:
    """Return the passes from the last of `rank` back to one that starts at 0."""
    positions: dict[int, list[int]] = {}
    position = len(orders[rank]) - 1
    queue, microbatch = orders[rank][position], problem.num_microbatches - 1
    while True:
        yield rank, position
        start = ends[queue][microbatch] - problem.times[queue][microbatch % problem.slices]
        if position:
            before = orders[rank][position - 1]
            count = orders[rank][:position].count(before)
            if ends[before][count - 1] > start - EPSILON:
                queue, microbatch, position = before, count - 1, position - 1
                continue
        awaited = problem.awaited[queue]
        if not awaited or start <= EPSILON:
            return
        arrivals = [
            (ends[need][last_of(microbatch, slices)] + edge, need, last_of(microbatch, slices))
            for need, edge, slices in awaited
        ]
        _, queue, microbatch = max(arrivals, key=lambda each: each[0])
        rank = problem.ranks[queue]
        if queue not in positions:
            positions[queue] = [i for i, other in enumerate(orders[rank]) if other == queue]
        position = positions[queue][microbatch]
