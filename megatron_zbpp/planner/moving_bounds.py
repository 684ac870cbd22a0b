"""Lower bounds under a memory limit, where activations may be elsewhere or be made again.

Of what a microbatch needs of a rank at least, each of its stages chooses: time of passes, time of
copies, and memory for some time. The makespan T has room for only so much of each:

- passes, those that make activations again included: T;
- copies, which run one at a time: T;
- memory: limit x T. What goes to the host is held during its F, until it has left, and while it
  comes back, until the end of its B; what is made again, from the start of R to the end of B; what
  is kept, from F until its microbatch has been to the last stage and back.

Any weighted mean of the three says that T is no less than the mean of what is needed, if each stage
chooses what needs least by these weights (the dual of a linear program in which a stage may choose
differently for parts of microbatches). The weights that say most are looked for; none is wrong.

What goes to a partner is held by one of the two all the time: so the same is asked of each pair of
partners as if it were one rank, with the memory of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import inf

from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.techniques.base import Life, Technique, Way

_GRID = 8  # weights are tried in so many steps first
_FINEST = 1 / 512
_ROUNDING = 1 + 2e-9  # of what schedules hold, and of the limit


def moving_bound(problem: Problem, actions: Sequence[Technique]) -> float:
    """Return a value that nothing within the limits can be below, whatever is done of `actions`.

    Args:
        problem: with limits; with times and amounts of what `actions` need.
        actions: that are allowed.
    """
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
