"""The named schedules as the planner sees them: what to beat, and where to start from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW, B, F, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.schedule import ScheduleError
from megatron_zbpp.planner.ends import replay
from megatron_zbpp.planner.limits import OnTime, always
from megatron_zbpp.planner.problem import Orders, Problem
from megatron_zbpp.schedules import FAMILIES, Family
from megatron_zbpp.schedules.registry import Sizes
from megatron_zbpp.techniques.slices.place import in_slices


@dataclass(frozen=True)
class Named:
    """Name of a schedule, with its chunks unless they are its default, its value and its orders."""

    name: str
    value: float
    orders: Orders


def named(problem: Problem, on_time: OnTime = always) -> list[Named]:
    """Return the named schedules on the problem's placement and within its limits, best first.

    `on_time` is asked before each family, the most promising first: see `in_turn`.
    """
    found: dict[str, list[Named]] = {}
    for family in in_turn(problem) if problem.is_plain else ():
        if family.moves:
            continue  # what a copy takes is no part of the problem
        if not on_time():
            break
        for schedule in variants(family, problem):
            orders = problem.orders(schedule)
            result = replay(problem, orders) if problem.fits(orders) else None
            if result is not None:
                name = family.label(problem.placement.num_chunks)
                found.setdefault(family.name, []).append(Named(name, result[0], orders))
    in_order = (entry for family in FAMILIES for entry in found.get(family.name, ()))
    return sorted(in_order, key=lambda entry: entry.value)


def in_turn(problem: Problem) -> list[Family]:
    """Return the families in the order to build them in, where there may be no time for all.

    Those that stay within the limits by their formula come first, those that look for their order
    by times last among them, as that takes long, and the smallest bubble before others.
    """
    placement = problem.placement
    sizes = Sizes(placement.num_ranks, problem.num_microbatches, placement.num_chunks)
    activation = problem.costs.amounts['activation']
    held = (sum(activation[s] for s in placement.stages(r)) for r in range(placement.num_ranks))
    room = min(most / own if own else inf for most, own in zip(problem.limits, held, strict=True))

    def turn(family: Family) -> tuple[bool, bool, float]:
        above = family.memory is not None and family.memory(sizes) > room * (1 + 1e-9)
        bubble = family.bubble(sizes) if family.bubble else inf
        return above, 'costs' in family.options, bubble

    return sorted(FAMILIES, key=turn)


def variants(family: Family, problem: Problem) -> Iterator[Schedule]:
    """Yield what the family can do on the problem's placement: as it is, and under the limit."""
    limit = min(problem.limits)
    adapts = 'memory_limit' in family.options and limit < inf
    costs = problem.costs if 'costs' in family.options else None
    m, n = problem.num_microbatches // problem.slices, problem.slices
    for within in (None, limit) if adapts else (None,):
        found = on_placement(family, problem.placement, m, costs, within, num_slices=n)
        if found is not None:
            yield found


def on_placement(
    family: Family,
    placement: Placement,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    together: bool = False,
    num_slices: int = 1,
) -> Schedule | None:
    """Return a family's schedule on a placement, as `build` does, in slices of each sequence.

    It is mirrored where the placement is: rank r is then rank p-1-r of the family's. None: the
    family has none there, or within that limit.
    """
    options: dict[str, Any] = {'num_chunks': placement.num_chunks, 'memory_limit': memory_limit}
    for m in (1, num_microbatches):  # the first tells the placement, at little expense
        try:
            found = in_slices(
                family.name,
                placement.num_ranks,
                m,
                num_slices,
                costs=costs,
                together=together,
                **options,
            )
        except ValueError:
            return None
        if placement not in (found.placement, found.placement.reversed()):
            return None
    return found if found.placement == placement else found.reversed()


class Joined(NamedTuple):
    """A schedule with cells, its value and its costs; `name` is its family, None a search's."""

    value: float
    name: str | None
    schedule: Schedule
    costs: Costs


def joined(problem: Problem, found: Schedule, on_time: OnTime = always) -> Iterator[Joined]:
    """Yield schedules with cells that the problem allows; none where costs say that hides nothing.

    `found` is the best schedule without cells; `on_time` is asked before each named schedule.
    """
    if problem.costs.least_share == 1 or not problem.is_plain or problem.slices > 1:
        return
    for name, schedule in _with_cells(problem, found, on_time):
        held = peak(schedule, problem.costs)
        fits = all(amount <= limit for amount, limit in zip(held, problem.limits, strict=True))
        if not schedule.together or not fits:
            continue
        try:
            timeline = simulate(schedule, problem.costs)
        except ScheduleError:  # a cell waits for what comes of itself
            continue
        yield Joined(timeline.value(problem.objective), name, schedule, problem.costs)


def _with_cells(
    problem: Problem, found: Schedule, on_time: OnTime
) -> Iterator[tuple[str | None, Schedule]]:
    """Yield a schedule with cells in it, then the families that have cells, where they can be."""
    for first, second in ((F, B), (B, F)):
        kinds = ((first, second), (BW if first == B else first, BW if second == B else second))
        cells: set[tuple[int, int]] = set()
        for rank, order in enumerate(found.passes):
            for at, (one, other) in enumerate(itertools.pairwise(order)):
                apart = one.microbatch != other.microbatch
                if (one.kind, other.kind) in kinds and apart and (rank, at - 1) not in cells:
                    cells.add((rank, at))
        yield None, replace(found, together=frozenset(cells))
    placement = problem.placement
    for family in FAMILIES:
        if not on_time():
            return
        own = on_placement(family, placement, problem.num_microbatches, together=True)
        if own is not None:
            yield family.label(placement.num_chunks), own
