"""Lower bounds: what no schedule on a placement can beat, and hence how good a plan is.

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
optimum lies above; on small instances `exact` closes that gap.

Of graphs with other passes than F, B and W, and of slices that differ, they say the first, and that
a rank does all its work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import inf

from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.techniques.base import Life, Technique, Way


def lower_bound(problem: Problem) -> float:
    """Return a value that no orders within the limits can be below."""
    ranks = range(problem.placement.num_ranks)
    queues = max(_queue_bound(problem, queue) for queue in range(problem.num_queues))
    if not (problem.is_plain and problem.even):
        ends = map(sum, zip(problem.firsts, problem.work, strict=True))
        return max(queues, *(a - b for a, b in zip(ends, problem.origins, strict=True)))
    works = max(_work_bound(problem, rank) for rank in ranks)
    return max(queues, works, *(_memory_bound(problem, rank) for rank in ranks))


def _queue_bound(problem: Problem, queue: int) -> float:
    """Return the time of all passes of a queue, from when the first can start."""
    work = problem.num_microbatches * problem.durations[queue]
    return problem.arrivals[queue] + work - problem.origins[problem.ranks[queue]]


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
    return max(own_end, before_last_forward + work - left + _rest(problem, f[-1]))


def _of_rank(problem: Problem, rank: int) -> Iterator[list[int]]:
    """Yield the queues of F, of B and of W on a rank, by stage."""
    stages = problem.placement.stages(rank)
    return ([queues[stage] for stage in stages] for queues in problem.by_stage)


def _rest(problem: Problem, forward: int) -> float:
    """Return the time from the end of a microbatch's F to its latest end, origins taken off."""
    done = problem.arrivals[forward] + problem.durations[forward]
    ends = (
        problem.arrivals[sink] + problem.durations[sink] - problem.origins[problem.ranks[sink]]
        for sink in problem.sinks
    )
    return max(ends) - done


def _most(times: list[float], amounts: list[int], m: int, cap: float) -> float:
    """Return the longest time of passes that `cap` holds: up to m of each, a fractional fill."""
    if len(set(amounts)) == 1 and amounts[0] and cap < inf:
        cap -= cap % amounts[0]
    total = 0.0
    kinds = sorted(zip(times, amounts, strict=True), key=lambda kind: _density(*kind), reverse=True)
    for time, amount in kinds:
        taken = min(m, cap / amount) if amount else m
        total += taken * time
        cap -= taken * amount
    return total


def _density(time: float, amount: int) -> float:
    return time / amount if amount else inf


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
