"""The value of a partition: by simulating named schedules on it, and a quick draft of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from megatron_zbpp.ir import BW, Placement, Schedule
from megatron_zbpp.partitioning.space import Partition, Space, fused_costs
from megatron_zbpp.planner.ends import replay
from megatron_zbpp.planner.named_schedules import on_placement
from megatron_zbpp.planner.pattern import Pattern, dispatch
from megatron_zbpp.planner.problem import Orders, Problem
from megatron_zbpp.schedules import find

_WHOLE = {  # by chunks a rank, whether in a loop: named schedules whose backward is whole
    (1, True): ('1f1b', '1f1b-pb'),
    (2, True): ('interleaved',),
    (2, False): ('1f1b-v',),
}
_SPLIT = {
    (1, True): ('zb-h1', 'zb-h2', '1f1b', '1f1b-pb'),
    (2, True): ('zb-interleaved', 'gis', 'interleaved'),
    (2, False): ('zb-v', 'v-half', '1f1b-v'),
}
_unweighted = lru_cache(64)(on_placement)  # one order whatever the costs
_DRAFTS = ((0.0, 1.0, inf), (0.5, 0.3, inf), (0.0, 2.0, 0.6))  # turn, delay, lead


@dataclass(frozen=True)
class Ranked:
    """A partition with the best schedule known for it."""

    partition: Partition  # what is where
    problem: Problem  # to plan
    value: float  # what the schedule takes, by the space's objective
    orders: Orders  # of the schedule, B and W apart
    schedule: Schedule | None  # it as it was built; None: it is a draft of the planner's


def names_for(space: Space, placement: Placement) -> tuple[str, ...]:
    """Return the named schedules to try on a placement."""
    key = min(placement.num_chunks, 2), placement.is_loop
    return (_WHOLE if space.fused else _SPLIT)[key]


def rank(
    space: Space, partition: Partition, names: Iterable[str] = (), draft: bool = True
) -> Ranked | None:
    """Return the best of the named schedules on a partition, and of drafts; None: none fits.

    Args:
        space: of the partition.
        partition: see there.
        names: of schedules; default: those that suit the placement.
        draft: whether a draft may be best.
    """
    problem = space.problem(partition)
    if problem is None:
        return None
    best: Ranked | None = None
    for orders, schedule in _tries(space, problem, names, draft):
        if not problem.fits(orders):
            continue
        on = problem
        whole = schedule is not None and any(
            p.kind == BW for order in schedule.passes for p in order[-1:]
        )
        if whole and not space.fused:
            if names:  # it is wanted as it is
                on = replace(problem, costs=fused_costs(problem.costs))
            else:
                schedule = None  # its B and W apart, which takes no longer
        result = replay(on, orders, cap=inf if best is None else best.value)
        if result is not None and (best is None or result[0] < best.value):
            best = Ranked(partition, problem, result[0], orders, schedule)
    if best is not None and space.objective == 'period':
        return Ranked(partition, problem, max(problem.work), best.orders, best.schedule)
    return best


def _tries(
    space: Space, problem: Problem, names: Iterable[str], draft: bool
) -> Iterator[tuple[Orders, Schedule | None]]:
    for name in names or names_for(space, problem.placement):
        schedule = named_schedule(name, problem)
        if schedule is not None:
            yield problem.orders(schedule), schedule
    if draft and not names and not space.fused:
        for turn, delay, lead in _DRAFTS:
            yield dispatch(problem, Pattern.straight(problem, turn, delay, lead)), None


def named_schedule(name: str, problem: Problem) -> Schedule | None:
    """Return a named schedule on the problem's placement; None: it is on another, or not for it."""
    family, sizes = find(name), (problem.placement, problem.num_microbatches)
    if 'costs' not in family.options:
        return _unweighted(family, *sizes)
    limit = min(problem.limits)
    adapts = 'memory_limit' in family.options and limit < inf
    return on_placement(family, *sizes, problem.costs, limit if adapts else None)
