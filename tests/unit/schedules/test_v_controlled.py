"""The schedules of controlled memory, where no formula says what they are."""

from __future__ import annotations

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build


def test_the_shorter_of_both_tightenings():
    """With the steady state tightened, too, V-Min would take 61 passes' time here."""
    schedule = build('v-min', 6, 7)
    timeline = simulate(schedule, Costs.uniform(schedule.placement, 2, 2, 2))
    assert timeline.makespan == max(timeline.windows) == 59
