"""Steady state of an endless schedule: the time of a call, and the age and copies of weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import fsum

from megatron_zbpp.ir import F, Pass, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline, idle
from megatron_zbpp.techniques.updates.graph import UPDATE
from megatron_zbpp.techniques.updates.versions import Delay, copies, delays, updates_of


@dataclass(frozen=True)
class SteadyState:
    """A call of a schedule once the pipeline is full.

    Attributes:
        num_microbatches: of a call.
        period: time of a call.
        bubble: share of it in which even the busiest rank idles.
        weight_copies: by stage, at most.
        delays: by stage, steps.
    """

    num_microbatches: int
    period: float
    bubble: float
    weight_copies: tuple[int, ...]
    delays: tuple[Delay, ...]


def steady_state(timeline: Timeline) -> SteadyState | None:
    """Return the steady state of a schedule; None: it has no updates, or too few calls."""
    schedule = timeline.schedule
    updates = updates_of(schedule.graph)
    calls = 0 if updates is None else whole_calls(schedule)
    if updates is None or calls < 2:
        return None
    m, ran = updates.every, timeline.by_pass
    # calls by turns short and long, in twos or threes, as lists of what is ready have them
    spread = 6 if calls > 12 else 1

    def stepped(stage: int, call: int) -> float:
        return ran[Pass(UPDATE, stage, (call + 1) * m - 1)][1]

    period = max(
        (stepped(stage, calls - 1) - stepped(stage, calls - 1 - spread)) / spread
        for stage in range(schedule.num_stages)
    )
    work = max(
        fsum(end - start for p in order if p.microbatch < m for start, end in (ran[p],))
        for order in schedule.passes
    )
    return SteadyState(m, period, idle(period, work), copies(schedule), delays(schedule))


def whole_calls(schedule: Schedule) -> int:
    """Return how many calls run all their forwards: not those with which the order ends."""
    last, fewest = schedule.num_microbatches - 1, schedule.num_microbatches
    for order in schedule.passes:
        steps = Counter[int]()  # by stage
        for p in order:
            steps[p.stage] += p.kind == UPDATE
            if p.kind == F and p.microbatch == last:
                fewest = min(fewest, steps[p.stage])
    return fewest


def with_weight_copies(costs: Costs, schedule: Schedule) -> Costs:
    """Return costs whose parameters count all copies of the weights.

    That is where they have the amount `weights`: those of one copy, by stage.
    """
    if updates_of(schedule.graph) is None or 'weights' not in costs.amounts:
        return costs
    more = (
        (number - 1) * one
        for number, one in zip(copies(schedule), costs.amounts['weights'], strict=True)
    )
    parameters = tuple(a + b for a, b in zip(costs.parameters, more, strict=True))
    return replace(costs, parameters=parameters)
