"""Forwards and backwards that run as one: schedules, their costs, programs and plans."""

from dataclasses import replace
from math import inf

import pytest
from figures import require_kept
from grids import grid
from orders import by_hand

from megatron_zbpp import Costs, Pass, Placement, Schedule, build, check, simulate
from megatron_zbpp.analysis.program import Join, Send
from megatron_zbpp.analysis.run_ahead import passes_ahead
from megatron_zbpp.ir import Together
from megatron_zbpp.planner.plans import joined, plan
from megatron_zbpp.planner.problem import Problem


def cells(schedule: Schedule, rank: int) -> list[str]:
    return [str(entry) for entry in schedule.order(rank) if isinstance(entry, Together)]


def test_those_of_dualpipe_v():
    schedule = build('dualpipe-v', 2, 5, together=True)
    own = '(0F3&3BW1) (3F2&0BW0) (0F4&3BW2) (3F3&0BW1) (3F4&0BW2)'
    assert cells(schedule, 0) == own.split()
    apart = build('dualpipe-v', 2, 5)
    assert schedule.passes == apart.passes and not apart.together
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize('p', range(2, 8))
def test_the_published_bubble_of_dualpipe_v(p):
    """(p-1)(F&B + B - 3W) where F&B takes what both do, all of its one direction: p - 1."""
    for m in range(1, 3 * p + 2):
        schedule = build('dualpipe-v', p, m, together=True)
        check(schedule)
        timeline = simulate(schedule, Costs.uniform(schedule.placement))
        assert m < 2 * p or max(timeline.windows) - 3 * m == p - 1
        assert bool(schedule.together) == (m > p), m
        for rank, at in schedule.together:
            first, second = schedule.passes[rank][at : at + 2]
            assert (first.kind, second.kind) == ('F', 'BW')
            assert first.stage != second.stage and first.microbatch > second.microbatch


def test_named_schedules_with_cells_are_candidates_on_their_placement():
    for placement, expected in (
        (Placement.v(2), {None, 'dualpipe-v', 'stp'}),
        (Placement.loop(2), {None}),
    ):
        costs = replace(Costs.uniform(placement), together=0.8)
        problem = Problem(placement, 6, costs, (inf, inf))
        found = build('dualpipe-v' if 'dualpipe-v' in expected else '1f1b', 2, 6)
        names = {each.name for each in joined(problem, found)}
        assert names <= expected and ('dualpipe-v' in names) == ('dualpipe-v' in expected)


def test_a_cell_takes_a_share_of_both():
    schedule = by_hand(1, 2, '0F0 (0F1&0BW0) 0BW1')
    costs = Costs.of((2.0,), (3.0,), (1.0,), together=0.5)
    assert simulate(schedule, costs).spans == (((0, 2), (2, 3), (3, 5), (5, 9)),)
    assert Costs.from_json('{"F": [2], "B": [3], "W": [1], "together": 0.5}') == costs
    whole = replace(costs, together=1.0)
    assert simulate(schedule, whole).spans == (((0, 2), (2, 4), (4, 8), (8, 12)),)


@pytest.mark.parametrize('p', [2, 4])
def test_what_cells_made_is_sent_behind_them(p):
    schedule = build('dualpipe-v', p, 3 * p, together=True)
    for rank, program in enumerate(check(schedule).programs):
        assert [i for i in program if isinstance(i, Pass)] == list(schedule.passes[rank])
        joins = [at for at, i in enumerate(program) if isinstance(i, Join)]
        assert [f'({"&".join(map(str, program[at].passes))})' for at in joins] == cells(
            schedule, rank
        )
        for at in joins:
            both = program[at].passes
            assert program[at + 1 : at + 3] == both
            sent = [i.producer for i in program if isinstance(i, Send) and i.producer in both]
            behind = program[at + 3 : at + 3 + len(sent) + 2]
            assert {i.producer for i in behind if isinstance(i, Send)} >= set(sent)


def test_cells_do_not_run_ahead():
    """A forward that waits for a backward is none of those before the optimizer's step."""
    schedule = by_hand(2, 2, '0F0 (0F1&0BW0) 0BW1', '1F0 1BW0 1F1 1BW1')
    check(schedule)
    assert passes_ahead(schedule) == (1, 0)


@grid(share=(0.7, 0.9, 1.0), objective=('makespan', 'window'), limit=(None, 5.0, 4.0))
def test_plans_know_what_cells_take(share, objective, limit):
    placement = Placement.v(4)
    costs = replace(Costs.uniform(placement), together=share)
    asked = {'objective': objective, 'memory_limit': limit, 'seconds': 0.2}
    found = plan([(placement, costs)], 12, **asked)
    assert found.schedule.name == 'planned', 'whatever it was made of'
    require_kept(found, limit, objective)
    apart = plan([(placement, replace(costs, together=1.0))], 12, **asked)
    assert found.value <= apart.value and not apart.schedule.together
    hidden = share < 0.8  # 4.5 activations, in which dualpipe-v has its cells, are more than 4
    assert bool(found.schedule.together) == (share < 1 and found.value < apart.value)
    assert not hidden or limit == 4.0 or found.value < apart.value
