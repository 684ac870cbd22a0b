"""Figures of schedules of which F, B and W take 1 each on a full rank, or the times given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import load, load_plan
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.partitioning.plans import PartitionPlan
from megatron_zbpp.planner.plans import Plan


def timeline(schedule: Schedule, *times: float, **more: float) -> Timeline:
    return simulate(schedule, Costs.uniform(schedule.placement, *times, **more))


def span(schedule: Schedule, *times: float, **more: float) -> float:
    return timeline(schedule, *times, **more).makespan


def held(schedule: Schedule) -> tuple[float, ...]:
    """The most activations that each rank holds."""
    return peak(schedule, Costs.uniform(schedule.placement))


def require_kept(
    plan: Plan | PartitionPlan, limit: float | Sequence[float] | None, objective: str = 'makespan'
) -> None:
    """Raise AssertionError if a plan is not what it says, or holds more than its limit."""
    check(plan.schedule)
    found = simulate(plan.schedule, plan.costs)
    value = found.makespan if objective == 'makespan' else max(found.windows)
    assert plan.value == pytest.approx(value) and plan.lower_bound <= plan.value + 1e-6
    if limit is not None:
        ranks = plan.schedule.num_ranks
        limits = [limit] * ranks if isinstance(limit, float | int) else limit
        both = zip(peak(plan.schedule, plan.costs), limits, strict=True)
        assert all(most <= allowed + 1e-9 for most, allowed in both)


def layers_of_ranks(path: Path) -> list[int]:
    """Decoder layers of Megatron's ranks, in reverse where the last one has no loss."""
    placement = load(path).placement
    if placement.only_route[-1] != placement.num_ranks - 1:
        placement = placement.reversed()
    stages = load_plan(path).layout.split('|')
    return [
        sum(stages[stage].count('t') for stage in placement.stages(rank))
        for rank in range(placement.num_ranks)
    ]
