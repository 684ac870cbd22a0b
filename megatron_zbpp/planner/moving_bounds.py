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
from collections.abc import Callable, Iterator, Sequence, Set
from math import inf
from typing import NamedTuple

from megatron_zbpp.ir import F, Task
from megatron_zbpp.ir.graph import HOST, PARTNER
from megatron_zbpp.ir.techniques import TRANSFERS, R
from megatron_zbpp.planner.problem import Problem

OFFLOAD, EVICT, RECOMPUTE = 'offload', 'evict', 'recompute'

_GRID = 8  # weights are tried in so many steps first
_FINEST = 1 / 512
_ROUNDING = 1 + 2e-9  # of what schedules hold, and of the limit


class _Way(NamedTuple):
    """Needs of one microbatch of a stage, by one action.

    Attributes:
        passes: time of them, beside F, B and W.
        copies: time of them.
        held: memory x time.
    """

    passes: float
    copies: float
    held: float


def moving_bound(problem: Problem, actions: Set[str]) -> float:
    """Return a value that nothing within the limits can be below, whatever is done of `actions`.

    Args:
        problem: with limits; with times and amounts of what `actions` need.
        actions: 'offload', 'recompute', 'evict'.
    """
    placement = problem.placement
    ranks = range(placement.num_ranks)
    groups = {frozenset((rank,)) for rank in ranks}
    if EVICT in actions:
        groups |= {frozenset((rank, placement.partner(rank))) for rank in ranks}
    return max(_bound(problem, sorted(group), actions) for group in groups)


def _bound(problem: Problem, ranks: Sequence[int], actions: Set[str]) -> float:
    """Of ranks that count as one: the mean of their times, the sum of their memory."""
    count, m = len(ranks), problem.num_microbatches
    room = sum(problem.limits[rank] for rank in ranks) * _ROUNDING
    if not 0 < room < inf:
        return 0.0
    stages = [stage for rank in ranks for stage in problem.placement.stages(rank)]
    ways = [list(_ways(problem, stage, actions, count > 1)) for stage in stages]
    work = sum(problem.work[rank] for rank in ranks) / count

    def least(passes: float, copies: float) -> float:
        """Time that the ranks need by these weights; memory has what is left of 1."""
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


def _ways(problem: Problem, stage: int, actions: Set[str], both: bool) -> Iterator[_Way]:
    """Yield what can be done with the activation of a stage.

    Args:
        problem: see `moving_bound`.
        stage: of it.
        actions: see `moving_bound`.
        both: whether its rank counts as one with its partner.
    """
    costs, durations = problem.costs, problem.durations
    count, rank = problem.placement.num_stages, problem.placement.ranks[stage]
    speed = costs.speeds[rank] if costs.speeds else 1.0
    held, forward, backward = (
        costs.amounts['activation'][stage],
        durations[stage],
        durations[count + stage],
    )
    there = problem.arrivals[2 * count + stage] - problem.arrivals[stage]  # F begins, B ends
    after = costs.amounts['retained'][stage] * durations[2 * count + stage]
    yield _Way(0.0, 0.0, held * there + after)
    moving = {OFFLOAD: TRANSFERS[HOST]} | ({} if both else {EVICT: TRANSFERS[PARTNER]})
    for action, kinds in moving.items():
        if action in actions:
            copies = sum(costs.time(Task(kind, stage)) for kind in kinds) / speed
            yield _Way(0.0, copies, held * min(there, forward + copies + backward) + after)
    if RECOMPUTE in actions:
        again = costs.time(Task(R, stage)) / speed
        before = 0.0
        if not actions & moving.keys():  # the input is there all the time
            kept = min(costs.amount('input', Task(F, stage)), held)
            before = kept * max(0.0, there - again - backward)
        yield _Way(again, 0.0, before + held * min(there, again + backward) + after)


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
