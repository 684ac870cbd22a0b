"""The named schedules as the planner sees them: what to beat, and where to start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from megatron_zbpp.ir import Schedule
from megatron_zbpp.planner.problem import Orders, Problem, replay
from megatron_zbpp.schedules import FAMILIES, Family, build


@dataclass(frozen=True)
class Named:
    """A named schedule, with its chunks where they are not its default, and what it takes."""

    name: str
    value: float
    orders: Orders


def named(problem: Problem) -> list[Named]:
    """Every named schedule that is on the problem's placement and within its limits, best first."""
    found: list[Named] = []
    for family in FAMILIES if problem.is_plain else ():
        if family.moves:
            continue  # what a copy takes is no part of the problem
        for schedule in variants(family, problem):
            orders = problem.orders(schedule)
            result = replay(problem, orders) if problem.fits(orders) else None
            if result is not None:
                name = family.label(problem.placement.num_chunks)
                found.append(Named(name, result[0], orders))
    return sorted(found, key=lambda entry: entry.value)


def variants(family: Family, problem: Problem) -> Iterator[Schedule]:
    """Yield what the family can do on the problem's placement: as it is, and under the limit."""
    probe = _built(family, problem, 1)
    if probe is None or probe.placement != problem.placement:
        return
    limit = min(problem.limits)
    adapts = 'memory_limit' in family.options and limit < inf
    for memory_limit in (None, limit) if adapts else (None,):
        schedule = _built(family, problem, problem.num_microbatches, memory_limit)
        if schedule is not None:
            yield schedule


def _built(
    family: Family, problem: Problem, num_microbatches: int, memory_limit: float | None = None
) -> Schedule | None:
    """None if the family cannot take this number of ranks, chunks or this limit."""
    try:
        return build(
            family.name,
            problem.placement.num_ranks,
            num_microbatches,
            num_chunks=problem.placement.num_chunks,
            costs=problem.costs if 'costs' in family.options else None,
            memory_limit=memory_limit,
        )
    except ValueError:
        return None
