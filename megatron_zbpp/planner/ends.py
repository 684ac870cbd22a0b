"""How long orders take: of given ones by `replay`, the planner's inner loop; of any at least.

Lower bounds say what no schedule on a placement can beat, and hence how good a plan is.
For each queue, all its passes after the first can start. For each rank r, from its own passes and
the time that others need at least:

- Idle at the start. Until the first B can reach r, at the earliest at b_r, r has only forwards to
  do, and no more of them than its memory holds (App. B of arXiv 2401.10241 has this for the first
  stage): it idles for b_r less the longest forwards that fit.
- Idle at the end. When r's last F ends, the last microbatch still has to go forward through the
  later stages, back through all, and through a W. Meanwhile r has only the backwards to do whose
  activations it holds by then, and idles for the rest.
- The two do not overlap unless all forwards fit into memory at once.
- Memory-time. An activation is held at least from its F until its microbatch has been to the last
  stage and back. All of these together fit into limit x time.

Together they are exact for many instances, ZB-V and V-Half at F = B = W among them. They are blind
to how passes of different ranks must fit together, so under tight limits with unequal times the
optimum lies above; on small instances `cp_sat` closes that gap.

Of graphs with other passes than F, B and W, and of slices that differ, they say the first, and that
a rank does all its work.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from math import inf

from megatron_zbpp.planner.problem import EPSILON, SEVERAL, Awaited, Ends, Orders, Problem
from megatron_zbpp.techniques.base import Life, Technique, Way


def replay(
    problem: Problem,
    orders: Orders,
    known: Ends | None = None,
    rank: int = 0,
    at: int = 0,
    cap: float = inf,
) -> tuple[float, Ends] | None:
    """Return value and ends of orders in which each pass runs as early as it may.

    `known` are ends of orders that differ only from position `at` of `rank` on: what ended before
    that is taken from there. None: the orders deadlock, or their value is above `cap`, which ends
    the replay at once.
    """
    ends: Ends = (
        [[] for _ in problem.durations]
        if known is None
        else _before(problem, orders, known, rank, at)
    )
    positions, clocks, spare = _resume(problem, ends, cap)
    times, needs, edges = problem.times, problem.needs, problem.edges
    cycle = len(times[0])  # all queues have as many times, one for each slice of a sequence
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
                clock += times[queue][len(own) % cycle]
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
    for need, edge, group in awaited:
        own, last = ends[need], last_of(microbatch, group)
        if len(own) <= last:
            return inf
        arrival = max(arrival, own[last] + edge)
    return arrival


def last_of(microbatch: int, group: int) -> int:
    """Return the last microbatch of its group, of so many."""
    return microbatch - microbatch % group + group - 1


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


def lower_bound(problem: Problem) -> float:
    """Return a value that no orders within the limits can be below."""
    ranks = range(problem.placement.num_ranks)
    queues = max(  # the time of all passes of a queue, from when the first can start
        arrival + problem.num_microbatches * time - problem.origins[rank]
        for arrival, time, rank in zip(
            problem.arrivals, problem.durations, problem.ranks, strict=True
        )
    )
    if not (problem.is_plain and problem.even):
        ends = map(sum, zip(problem.firsts, problem.work, strict=True))
        return max(queues, *(a - b for a, b in zip(ends, problem.origins, strict=True)))
    works = max(_work_bound(problem, rank) for rank in ranks)
    return max(queues, works, *(_memory_bound(problem, rank) for rank in ranks))


def _work_bound(problem: Problem, rank: int) -> float:
    m, times = problem.num_microbatches, problem.durations
    first, work, cap = problem.firsts[rank], problem.work[rank], problem.caps[rank]
    f, b, w = _of_rank(problem, rank)
    held = [problem.changes[queue] for queue in f]
    forwards = [times[queue] for queue in f]
    backwards = [times[backward] + times[weight] for backward, weight in zip(b, w, strict=True)]
    weights = [times[queue] for queue in w]
    kept = [-problem.changes[queue] for queue in w]

    first_backward = problem.arrivals[b[-1]]
    idle = max(first, first_backward - _most(forwards, held, m, cap))
    own_end = work + idle - problem.origins[rank]
    before_last_forward = idle if m * sum(held) > cap else first
    left = _most(backwards + weights, held + kept, m, cap)
    left = min(left, m * sum(backwards))
    # from the end of a microbatch's last F here to its latest end, origins taken off
    ends = (
        problem.arrivals[sink] + times[sink] - problem.origins[problem.ranks[sink]]
        for sink in problem.sinks
    )
    rest = max(ends) - (problem.arrivals[f[-1]] + times[f[-1]])
    return max(own_end, before_last_forward + work - left + rest)


def _of_rank(problem: Problem, rank: int) -> Iterator[list[int]]:
    stages = problem.placement.stages(rank)
    return ([queues[stage] for stage in stages] for queues in problem.by_stage)


def _most(times: list[float], amounts: list[int], m: int, cap: float) -> float:
    """Return the longest time of passes that `cap` holds: up to m of each, a fractional fill."""
    if len(set(amounts)) == 1 and amounts[0] and cap < inf:
        cap -= cap % amounts[0]
    total = 0.0
    kinds = list(zip(times, amounts, strict=True))
    kinds.sort(key=lambda kind: kind[0] / kind[1] if kind[1] else inf, reverse=True)
    for time, amount in kinds:
        taken = min(m, cap / amount) if amount else m
        total += taken * time
        cap -= taken * amount
    return total


def _memory_bound(problem: Problem, rank: int) -> float:
    cap = problem.caps[rank]
    if cap in (0, inf):
        return 0.0
    total = 0.0
    forwards, _, weights = _of_rank(problem, rank)
    for forward, weight in zip(forwards, weights, strict=True):
        there = problem.arrivals[weight] - problem.arrivals[forward]  # W may start where B ends
        kept = -problem.changes[weight]
        total += problem.changes[forward] * there + kept * problem.durations[weight]
    held_for = total * problem.num_microbatches / cap
    return held_for + problem.firsts[rank] - problem.origins[rank]


_GRID = 8  # weights are tried in so many steps first
_FINEST = 1 / 512
_ROUNDING = 1 + 2e-9  # of what schedules hold, and of the limit


def moving_bound(problem: Problem, actions: Sequence[Technique]) -> float:
    """Return a value that nothing within the limits can be below, whatever is done of `actions`."""
    if any(technique.way is None for technique in actions):
        return 0.0
    placement = problem.placement
    ranks = range(placement.num_ranks)
    groups = {frozenset((rank,)) for rank in ranks}
    if any(technique.pairs for technique in actions):
        groups |= {frozenset((rank, placement.partner(rank))) for rank in ranks}
    return max(_bound(problem, sorted(group), actions) for group in groups)


def _bound(problem: Problem, ranks: Sequence[int], actions: Sequence[Technique]) -> float:
    """Return the bound of ranks that count as one: mean of their times, sum of their memory."""
    count, m = len(ranks), problem.num_microbatches
    room = sum(problem.limits[rank] for rank in ranks) * _ROUNDING
    if not 0 < room < inf:
        return 0.0
    stages = [stage for rank in ranks for stage in problem.placement.stages(rank)]
    ways = [list(_ways(problem, stage, actions, count > 1)) for stage in stages]
    work = sum(problem.work[rank] for rank in ranks) / count

    def least(passes: float, copies: float) -> float:
        memory = 1 - passes - copies
        return passes * work + m * sum(
            min(
                (passes * way.passes + copies * way.copies) / count + memory * way.held / room
                for way in each
            )
            for each in ways
        )

    first = min(problem.firsts[rank] for rank in ranks)
    return first - max(problem.origins[rank] for rank in ranks) + _highest(least)


def _ways(problem: Problem, stage: int, actions: Sequence[Technique], both: bool) -> Iterator[Way]:
    """Yield the costs of each technique for the activation of a stage."""
    costs, durations = problem.costs, problem.durations
    rank = problem.placement.only_route[stage]
    forward, backward, weight = (queues[stage] for queues in problem.by_stage)
    speed = costs.speeds[rank] if costs.speeds else 1.0
    held = costs.amounts['activation'][stage]
    there = problem.arrivals[weight] - problem.arrivals[forward]  # F begins, B ends
    after = costs.amounts['retained'][stage] * durations[weight]
    others = [technique for technique in actions if not (both and technique.pairs)]
    stays = not any(technique.moves for technique in others)
    life = Life(held, durations[forward], durations[backward], there, speed, stays)
    yield Way(0.0, 0.0, held * there + after)
    for technique in others:
        assert technique.way is not None  # else there is no bound
        way = technique.way(costs, stage, life)
        yield way._replace(held=way.held + after)


def _highest(least: Callable[[float, float], float]) -> float:
    """Return the most that a concave function has for any weights, as far as steps find it."""
    grid = [k / _GRID for k in range(_GRID + 1)]
    found = [(least(a, b), a, b) for a, b in itertools.product(grid, grid) if a + b <= 1]
    value, passes, copies = max(found)
    step = 1 / (2 * _GRID)
    while step >= _FINEST:
        near = [
            (least(a, b), a, b)
            for a, b in itertools.product(
                (passes - step, passes, passes + step), (copies - step, copies, copies + step)
            )
            if min(a, b) >= 0 and a + b <= 1
        ]
        best = max(near)
        if best[0] <= value:
            step /= 2
        value, passes, copies = max(best, (value, passes, copies))
    return value
