"""When passes end, in given orders of a problem: the planner's inner loop."""

from __future__ import annotations

from bisect import bisect_left
from math import inf

from megatron_zbpp.planner.problem import EPSILON, SEVERAL, Awaited, Ends, Orders, Problem


def replay(
    problem: Problem,
    orders: Orders,
    known: Ends | None = None,
    rank: int = 0,
    at: int = 0,
    cap: float = inf,
) -> tuple[float, Ends] | None:
    """Return value and ends of orders in which each pass runs as early as it may.

    Args:
        problem: what the orders are for.
        orders: per rank.
        known: ends of orders that differ only from position `at` of `rank` on: what ended before
            that is taken from there.
        rank: see `known`.
        at: see `known`.
        cap: a value above this is of no interest.

    Returns:
        None if the orders deadlock, or as soon as their value is known to be above `cap`.
    """
    ends: Ends = (
        [[] for _ in problem.durations]
        if known is None
        else _before(problem, orders, known, rank, at)
    )
    positions, clocks, spare = _resume(problem, ends, cap)
    times, needs, edges = problem.times, problem.needs, problem.edges
    slices = problem.slices
    running = [r for r, order in enumerate(orders) if positions[r] < len(order)]
    while running:
        waiting: list[int] = []
        moved = False
        for r in running:
            order, clock, first = orders[r], clocks[r], positions[r]
            position, slack = first, spare[r]
            for position in range(first, len(order)):
                queue = order[position]
                own, need = ends[queue], needs[queue]
                if need >= 0:
                    needed = ends[need]
                    if len(needed) <= len(own):
                        waiting.append(r)
                        break
                    arrival = needed[len(own)] + edges[queue]
                elif need == SEVERAL:
                    arrival = latest(problem.awaited[queue], len(own), ends)
                    if arrival == inf:
                        waiting.append(r)
                        break
                else:
                    arrival = 0.0
                if arrival > clock:
                    slack -= arrival - clock
                    if slack < -EPSILON:
                        return None
                    clock = arrival
                clock += times[queue][len(own) % slices]
                own.append(clock)
            else:
                position = len(order)
            moved = moved or position > first
            positions[r], clocks[r], spare[r] = position, clock, slack
        if not moved:
            return None
        running = waiting
    return max(clock - origin for clock, origin in zip(clocks, problem.origins, strict=True)), ends


def latest(awaited: Awaited, microbatch: int, ends: Ends) -> float:
    """Return when the last of several inputs is there; inf: one has not ended."""
    arrival = 0.0
    for need, edge, slices in awaited:
        own, last = ends[need], last_of(microbatch, slices)
        if len(own) <= last:
            return inf
        arrival = max(arrival, own[last] + edge)
    return arrival


def last_of(microbatch: int, slices: int) -> int:
    """Return the last of those `slices` of a sequence to which this one belongs."""
    return microbatch - microbatch % slices + slices - 1


def replay_whole(problem: Problem, orders: Orders) -> tuple[float, Ends]:
    """Return value and end of orders that do not deadlock."""
    result = replay(problem, orders)
    if result is None:
        raise ValueError(f'orders that deadlock: {orders}')
    return result


def _before(problem: Problem, orders: Orders, known: Ends, rank: int, at: int) -> Ends:
    """Return the ends of `known` that a change from position `at` of `rank` on cannot touch."""
    kept = orders[rank][:at]
    counts = {queue: kept.count(queue) for queue in problem.queues[rank]}
    change = known[kept[-1]][counts[kept[-1]] - 1] if kept else 0.0
    return [
        ends[: counts[queue] if queue in counts else bisect_left(ends, change)]
        for queue, ends in enumerate(known)
    ]


def _resume(problem: Problem, ends: Ends, cap: float) -> tuple[list[int], list[float], list[float]]:
    """Return, per rank: position, clock, and how long it may idle before exceeding `cap`."""
    positions: list[int] = []
    clocks: list[float] = []
    spare: list[float] = []
    for queues, work, origin in zip(problem.queues, problem.work, problem.origins, strict=True):
        position, clock, done = 0, 0.0, 0.0
        for queue in queues:
            own = ends[queue]
            if own:
                position += len(own)
                done += problem.spent(queue, len(own))
                clock = max(clock, own[-1])
        positions.append(position)
        clocks.append(clock)
        spare.append(cap + origin - work - clock + done)
    return positions, clocks, spare
