"""Grouped interleaving between its named points: every group size, lead and deferral of W.

`gis-h`, `gis` and `zb-interleaved` are three points of one family on the loop placement: groups of
g microbatches go chunk by chunk, rank s runs some forwards ahead for each rank below it, and puts
off some of its Ws. Memory grows with g, the bubble falls: starts for the search at any limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_zbpp.ir import Schedule
from megatron_zbpp.planner.budget import OnTime, always
from megatron_zbpp.planner.ends import replay
from megatron_zbpp.planner.problem import Orders, Problem
from megatron_zbpp.schedules.construct.phases import split_one_forward_one_backward

_AHEAD = (1.0, 1.5)
_DEFER = (0.0, 0.5, 1.0, 1.5)
_KEPT = 3


@dataclass(frozen=True)
class _Grouping:
    """The parameters of one schedule of the family.

    Attributes:
        size: of the largest group.
        ahead: further forwards in the warm-up for each rank below.
        defer: Bs without a W for each rank above.
    """

    size: int
    ahead: float
    defer: float

    def orders(self, problem: Problem) -> Orders:
        placement, m = problem.placement, problem.num_microbatches
        count = -(-m // self.size)
        groups = [m // count + (i < m % count) for i in range(count)]
        below = placement.num_ranks - 1
        passes = (
            split_one_forward_one_backward(
                placement.stages(rank),
                groups,
                ahead=int(self.ahead * (below - rank)) + problem.slices - 1,
                defer=int(self.defer * rank),
            )
            for rank in range(placement.num_ranks)
        )
        return problem.orders(Schedule.of('grouped', placement, m, passes))


def grouped(problem: Problem, on_time: OnTime = always) -> list[Orders]:
    """Return the best few of the family within the limits; none but on a loop of several chunks.

    Args:
        problem: what they are for.
        on_time: asked before each of the family.
    """
    placement = problem.placement
    if placement.num_chunks < 2 or not placement.is_loop or not problem.is_plain:
        return []
    few = problem.with_fewer_microbatches
    ranked = sorted(_values(few, on_time), key=lambda entry: entry[0])
    return [grouping.orders(problem) for _, grouping in ranked[:_KEPT] if on_time()]


def _values(problem: Problem, on_time: OnTime) -> Iterator[tuple[float, _Grouping]]:
    p = problem.placement.num_ranks
    for choice in product(range((p + 1) // 2, p + 1), _AHEAD, _DEFER):
        if not on_time():
            return
        grouping = _Grouping(*choice)
        orders = grouping.orders(problem)
        result = replay(problem, orders) if problem.fits(orders) else None
        if result is not None:
            yield result[0], grouping
