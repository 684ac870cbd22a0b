"""Forwards and backwards that run as one, for costs that say how much of their time that hides.

The search knows none. What it has found gets them where they stand side by side, if that is
shorter; and the named schedules that have some are built with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW, B, F, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.errors import ScheduleError
from megatron_zbpp.planner.budget import OnTime, always
from megatron_zbpp.planner.named_schedules import on_placement
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.schedules import FAMILIES


class Joined(NamedTuple):
    """A schedule with cells, its value and its costs; `name` is its family, None a search's."""

    value: float
    name: str | None
    schedule: Schedule
    costs: Costs


def joined(problem: Problem, found: Schedule, on_time: OnTime = always) -> Iterator[Joined]:
    """Yield schedules with cells that the problem allows; none where costs say that hides nothing.

    Args:
        problem: what to plan.
        found: the best schedule of it without cells.
        on_time: asked before each named schedule.
    """
    if problem.costs.least_share == 1 or not problem.is_plain or problem.slices > 1:
        return
    candidates = [(None, _side_by_side(found, *kinds)) for kinds in ((F, B), (B, F))]
    for name, schedule in itertools.chain(candidates, _named(problem, on_time)):
        held = peak(schedule, problem.costs)
        fits = all(amount <= limit for amount, limit in zip(held, problem.limits, strict=True))
        if not schedule.together or not fits:
            continue
        try:
            timeline = simulate(schedule, problem.costs)
        except ScheduleError:  # a cell waits for what comes of itself
            continue
        yield Joined(timeline.value(problem.objective), name, schedule, problem.costs)


def _side_by_side(schedule: Schedule, first: str, second: str) -> Schedule:
    kinds = ((first, second), (BW if first == B else first, BW if second == B else second))
    cells: set[tuple[int, int]] = set()
    for rank, order in enumerate(schedule.passes):
        for at, (one, other) in enumerate(itertools.pairwise(order)):
            apart = one.microbatch != other.microbatch
            if (one.kind, other.kind) in kinds and apart and (rank, at - 1) not in cells:
                cells.add((rank, at))
    return replace(schedule, together=frozenset(cells))


def _named(problem: Problem, on_time: OnTime) -> Iterator[tuple[str, Schedule]]:
    """Yield families that have cells, where they are on the problem's placement."""
    placement = problem.placement
    for family in FAMILIES:
        if not on_time():
            return
        found = on_placement(family, placement, problem.num_microbatches, together=True)
        if found is not None:
            yield family.label(placement.num_chunks), found
