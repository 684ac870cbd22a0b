"""The named schedules as the planner sees them: those on its placement, and no others."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.ir import Pass, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.actions import ActionSearch
from megatron_zbpp.planner.budget import Budget
from megatron_zbpp.planner.named_schedules import named, on_placement, variants
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.schedules import family, find
from megatron_zbpp.techniques import find as find_technique

LOOP = Placement.loop(2)
COSTS = Costs.uniform(LOOP)


@family('both-ways')
def both_ways(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two pipelines against each other, one after the other."""
    placement = Placement.two_way(num_ranks)
    orders: list[list[Pass]] = [[] for _ in range(num_ranks)]
    for i in range(num_microbatches):
        stages = range(num_ranks)
        for kind, visited in (('F', stages), ('BW', reversed(stages))):
            for stage in visited:
                orders[placement.rank_of(stage, i)].append(Pass(kind, stage, i))
    return Schedule.of('both-ways', placement, num_microbatches, orders)


def test_a_family_on_two_routes_is_not_on_a_loop():
    check(both_ways(2, 4))
    problem = Problem(LOOP, 4, COSTS, (inf, inf))
    assert [s.name for s in variants(find('1f1b'), problem)] == ['1f1b']
    assert not [*variants(find(f'{__name__}:both-ways'), problem)]


@pytest.mark.parametrize('placement', [Placement.v(3), Placement.v(3).reversed()])
def test_families_are_mirrored_where_the_placement_is(placement):
    found = on_placement(find('zb-v'), placement, 4)
    check(found)
    assert found.placement == placement
    problem = Problem(placement, 4, Costs.uniform(placement), (inf,) * 3)
    assert 'zb-v' in {each.name for each in named(problem)}


def test_a_family_has_none_on_other_placements():
    assert on_placement(find('zb-v'), Placement.loop(3, 2), 4) is None
    assert on_placement(find('zb-v'), Placement.loop(3), 4) is None, 'it takes two chunks a rank'


def test_a_start_on_two_routes_is_left_out():
    found = plan([(LOOP, COSTS)], 4, seconds=0.1, starts=[both_ways(2, 4)])
    assert found.schedule.placement == LOOP
    search = ActionSearch([(LOOP, COSTS)], 4, None, 'makespan', ())
    search.start(both_ways(2, 4))
    assert search.best is None


def test_nothing_is_tried_where_nothing_began():
    search = ActionSearch([(LOOP, COSTS)], 4, None, 'makespan', (find_technique('recompute'),))
    search.climb(Budget(1.0), Random(7))
    assert search.best is None


def test_two_routes_cannot_be_planned():
    with pytest.raises(ValueError, match="placement 'two-way' has two routes: plan on one of one"):
        plan([(Placement.two_way(2), COSTS)], 4, seconds=0.1)
