"""The named schedules as the planner sees them: what to beat, and where to start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from megatron_zbpp.ir import Schedule
from megatron_zbpp.planning.problem import Orders, Problem, replay
from megatron_zbpp.schedules import FAMILIES, Family, build


@dataclass(frozen=True)
class Named:
    """A named schedule with its value on a problem."""

    name: str
    value: float
    orders: Orders


def named(problem: Problem) -> list[Named]:
    """Every named schedule that is on the problem's placement and within its limits, best first."""
    found = []
    for family in FAMILIES:
        for schedule in _variants(family, problem):
            orders = problem.orders(schedule)
            result = replay(problem, orders) if problem.fits(orders) else None
            if result is not None:
                found.append(Named(family.name, result[0], orders))
    return sorted(found, key=lambda entry: entry.value)


def _variants(family: Family, problem: Problem) -> Iterator[Schedule]:
    """What the family can do on the problem's placement: as it is, and under the limit."""
    limit = min(problem.limits)
    limits = [None] + [limit] * ('memory_limit' in family.options and limit < inf)
    for memory_limit in limits:
        try:
            schedule = build(
                family.name,
                problem.placement.num_ranks,
                problem.num_microbatches,
                num_chunks=problem.placement.num_chunks,
                costs=problem.costs if 'costs' in family.options else None,
                memory_limit=memory_limit,
            )
        except ValueError:
            continue  # a family that cannot take this number of ranks, chunks or this limit
        if schedule.placement.ranks == problem.placement.ranks:
            yield schedule
