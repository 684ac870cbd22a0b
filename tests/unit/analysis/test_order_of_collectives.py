"""A collective ends when all ranks have entered it: none may first run a pass that ends later."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from megatron_zbpp.analysis import lowering
from megatron_zbpp.analysis.program import Exchange
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Pass
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE
from megatron_zbpp.techniques.vocabulary.place import in_shards, with_shard_times


def latest(schedule, costs):
    """By how much the last rank enters a collective behind the last contribution, in forwards."""
    ends = simulate(schedule, costs).by_pass
    late = 0.0
    for program in lowering.lower(schedule):
        now = 0.0
        for each in program:
            if isinstance(each, Pass):
                now = ends[each][1]
            elif isinstance(each, Exchange):
                late = max(late, now - max(ends[p][1] for p in each.producers))
    return late


def made(name, share):
    host = build(name, 8, 16)
    costs = with_shard_times(Costs.uniform(host.placement), host.placement, share)
    return in_shards(host, costs), costs


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
@pytest.mark.parametrize(('share', 'known'), [(USUAL_SHARE, False), (0.5, True), (0.8, True)])
def test_all_ranks_enter_before_the_last_contribution(name, share, known):
    """By the costs that a schedule was made for, else by what shards usually take.

    The latency by which programs are written makes some hundredths.
    """
    schedule, costs = made(name, share)
    schedule = replace(schedule, costs=costs) if known else schedule
    assert latest(schedule, costs) < 0.2


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_that_would_show_programs_of_other_times(name):
    """As they were: S and T took none."""
    schedule, costs = made(name, 0.5)
    untimed = Costs.uniform(schedule.placement, comm=0.01)
    with mock.patch.object(lowering, 'usual_costs', lambda _: untimed):
        assert latest(schedule, costs) > 0.3
