"""The clock ends every part of planning that takes long, and small questions are never cut."""

import itertools
from dataclasses import replace
from math import inf
from unittest.mock import Mock

import pytest

from megatron_zbpp import Costs, Placement, build, simulate
from megatron_zbpp.cli import planning
from megatron_zbpp.planner import actions, limits, pattern, plan_requests, plans, search
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.planner.sequence_slices import slice_counts
from megatron_zbpp.techniques.slices.balance import Attention

P, M = 4, 24
PLACEMENTS = (Placement.loop(P), Placement.v(P), Placement.loop(P, 4))
CANDIDATES = [(at, Costs.uniform(at)) for at in PLACEMENTS]


def counted(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> Mock:
    """Count the calls of a function by the name that `module` has for it."""
    calls = Mock(wraps=getattr(module, name))
    monkeypatch.setattr(module, name, calls)
    return calls


def test_a_large_question_ends_with_what_the_clock_left_time_for(ticks, monkeypatch):
    ticks(1.0)
    built = counted(monkeypatch, plans, 'on_placement')
    tried = counted(monkeypatch, pattern, 'replay')
    followed = counted(monkeypatch, search, 'extrapolate')
    shares: list[float] = []
    made = plan(CANDIDATES, M, seconds=20.0, progress=shares.append)
    assert not made.repeats and made.lower_bound <= made.value
    assert 0 < built.call_count < 20 and tried.call_count < 20 and not followed.called
    assert shares == sorted(shares) and len(shares) > 5 and 0 < shares[0] < 0.2 and shares[-1] <= 1


def test_each_placement_gets_a_share(ticks):
    """The last of them has the least idle time: with all of the time for the first, none is."""
    ticks(0.5)
    made = plan(CANDIDATES, M, seconds=20.0)
    assert made.best_named is not None and made.best_named[0] in ('zb-v', 'zb-interleaved v=4')
    assert made.schedule.placement != PLACEMENTS[0]


@pytest.mark.parametrize('limit', [None, P / 2])
def test_without_any_time_there_is_one_plan(ticks, limit):
    bounds = [plan([each], M, seconds=0.1, memory_limit=limit).lower_bound for each in CANDIDATES]
    ticks(100.0)
    made = plan(CANDIDATES, M, seconds=1.0, memory_limit=limit)
    assert not made.repeats and made.best_named is None
    assert made.lower_bound == min(bounds) < made.value  # of those, too, on which there is none


def test_small_questions_are_not_cut(ticks):
    small = [(at, Costs.uniform(at)) for at in (Placement.loop(P), Placement.v(P))]
    ticks(0.0)
    known = plan(small, 8, seconds=0.1)
    ticks(100.0)
    assert plan(small, 8, seconds=0.1).best_named == known.best_named is not None


def test_repeating_the_steady_state_ends_with_the_clock(monkeypatch):
    """It is tried at twenty-nine places of the time."""
    placement, costs = CANDIDATES[0]
    many = Problem(placement, 3 * M, costs, (3.0,) * P)
    few = many.with_fewer_microbatches
    replayed = counted(monkeypatch, search, 'replay')
    orders = pattern.dispatch(few, pattern.Pattern.straight(few, 0.5, 1.0, inf))
    assert search.extrapolate(few, orders, many) and replayed.call_count > 4
    replayed.reset_mock()
    left = iter([True, True, True])
    search.extrapolate(few, orders, many, lambda: next(left, False))
    assert replayed.call_count == 4


def test_a_turn_is_a_share_of_the_time_that_is_left(ticks):
    ticks(1.0)
    whole = limits.Budget(40.0)
    turn = whole.turn(0.5)
    assert len(list(itertools.takewhile(lambda _: turn(), range(40)))) == 9  # two looks each
    assert whole.overran and whole.on_time() and whole.left == whole.steps


def test_cells_of_named_schedules_end_with_the_clock(ticks, monkeypatch):
    placement = Placement.v(P)
    costs = replace(Costs.uniform(placement), together=0.9)
    built = counted(monkeypatch, plans, 'on_placement')
    ticks(60.0)
    plan([(placement, costs)], M, seconds=50.0)
    assert not built.called
    ticks(0.0)
    plan([(placement, costs)], M, seconds=0.1)
    assert built.called


def test_actions_are_searched_for_within_the_time(ticks, monkeypatch):
    placement = Placement.v(P)
    costs = Costs.uniform(placement).with_times(O=(0.5,) * 2 * P, L=(0.5,) * 2 * P)
    rated = counted(monkeypatch, actions, 'variants')
    ticks(0.5)
    shares: list[float] = []
    asked = {'actions': ('offload',), 'memory_limit': P / 2, 'progress': shares.append}
    made = plan_within([(placement, costs)], M, seconds=40.0, **asked)
    assert not made.repeats and 0 < rated.call_count < 20
    assert limits.time.monotonic() < 44.0
    assert shares == sorted(shares) and 0 < shares[0] < 0.3 and shares[-1] <= 1


@pytest.mark.parametrize(('limit', 'best'), [(2.0, 'po-f'), (3.0, 'po-h'), (4.0, 'zb-v')])
def test_what_fits_is_tried_before_the_clock_ends_it(ticks, monkeypatch, limit, best):
    """With actions, too, a plan is no worse than the named schedules that keep the limit."""
    placements = (Placement.loop(P), Placement.v(P), Placement.loop(P, 2))
    copied = {at: (0.5,) * at.num_stages for at in placements}
    asked = [(at, Costs.uniform(at).with_times(O=copied[at], L=copied[at])) for at in placements]
    rated = counted(monkeypatch, actions, 'simulate')
    built = counted(monkeypatch, actions, 'variants')
    ticks(0.1)
    made = plan_within(asked, M, actions=('offload',), memory_limit=limit, seconds=40.0)
    named = build(best, P, M)
    by_name = simulate(named, dict(asked)[named.placement]).makespan
    assert made.best_named is not None and made.value <= by_name + 1e-9
    assert not made.repeats and 0 < rated.call_count < 150
    asked = (call.args for call in built.call_args_list)
    whole = {family.name for family, problem in asked if problem.num_microbatches == M}
    assert whole.isdisjoint({'merak', 'varuna', 'bpipe'}), 'of other actions: not built to the end'


def test_turns_of_families():
    """What keeps the limit first, then what is built quickly, then the smallest bubble."""
    at = Placement.v(P)
    for limit, first in (
        (inf, ['zb-h2', 'zb-v', 'stp']),
        (P, ['zb-v', 'zb-interleaved', 'v-half']),
        (2.5, ['v-min', 'po-h', 'po-f']),
        (1.0, ['merak', 'varuna', 'zb-h2']),
    ):
        problem = Problem(at, M, Costs.uniform(at), (limit,) * P)
        assert [family.name for family in plans.in_turn(problem)][:3] == first
    left = iter([True, True, False])
    found = slice_counts(
        CANDIDATES, 4, 4096, Attention(), least=1, on_time=lambda: next(left, False)
    )
    assert [each.slices for each in found] == [1, 2, 4]


@pytest.mark.parametrize(('asked', 'halves'), [('auto', True), ('2', False)])
def test_finding_slices_and_planning_share_the_time(monkeypatch, zbpp, asked, halves):
    """What `--slices auto` takes to find how many is not there to plan them."""
    given: list[float] = []
    original, begun = plan_requests.planned, plan_requests.Budget

    def planned(*args: object, seconds: float, **options: object) -> object:
        given.append(seconds)
        return original(*args, seconds=seconds, **options)

    def found_in(seconds: float, *report: object) -> object:
        given.append(seconds)
        return begun(seconds, *report)

    monkeypatch.setattr(plan_requests, 'planned', planned)
    monkeypatch.setattr(plan_requests, 'Budget', found_in)
    words = f'--pp 2 --microbatches 2 --slices {asked} --seq-length 8192 --seconds 0.5'
    zbpp(f'plan {words} --no-cache')
    assert given == ([0.25, 0.25] if halves else [0.5])


@pytest.mark.parametrize('share', [0.0, 1.0])
def test_a_short_search_over_actions_says_so(monkeypatch, zbpp, share):
    monkeypatch.setattr(planning, '_WIDE', share)
    words = 'plan --pp 4 --microbatches 12 --actions offload --memory-limit 2 --seconds 0.1'
    gap = zbpp(f'{words} --no-cache --json')['gap']
    assert 0.0 < gap < 1.0
    said = f'zbpp: gap {gap:.0%}: a search of 0.1 s tries few actions for '
    assert (said in zbpp.err) == (share == 0.0) == ('give more --seconds' in zbpp.err)
