"""Activations on a partner, whatever the order: within the limit, proven, and no pass moves."""

from __future__ import annotations

import pytest
from oracle import programs_always_end

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Pass, Placement, Schedule, Together
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build, names
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.evict.place import bound, with_eviction
from megatron_zbpp.techniques.offload.place import with_offload
from megatron_zbpp.techniques.recompute.place import with_recomputation


def evicted(schedule: Schedule, limits, costs: Costs | None = None, stages=None) -> Schedule:
    costs = costs or Costs.uniform(schedule.placement)
    return with_eviction(schedule, stages or range(schedule.num_stages), costs, limits)


def others(schedule: Schedule) -> tuple[tuple[Pass, ...], ...]:
    return tuple(tuple(p for p in order if p.kind not in 'EK') for order in schedule.passes)


# 2bp holds the most behind its last B, for W: none of that can leave
@pytest.mark.parametrize('name', [name for name in names(plain=True) if name != '2bp'])
def test_any_schedule(name):
    """The first rank may hold less than it would: it may run, by all rules, and holds less.

    That is so for whatever is away from behind the pass after its F to the one before B.
    """
    plain = build(name, 4, 8)
    costs = Costs.uniform(plain.placement)
    before = peak(plain, costs)
    limits = [0.75 * before[0], *(before[1:])]
    schedule = evicted(plain, limits)
    check(schedule)
    assert others(schedule) == plain.passes
    assert {plain.rank_of(p) for _, p in schedule if p.kind in 'EK'} <= {0}
    after = peak(schedule, costs)
    assert after[1:3] == before[1:3] and after[0] <= before[0]
    if any(p.kind == 'E' for _, p in schedule):
        assert after[0] < before[0] and after[3] > before[3]
        assert simulate(schedule, costs).makespan == simulate(plain, costs).makespan


@pytest.mark.parametrize(('p', 'm'), [(4, 8), (6, 12), (8, 16), (8, 17), (12, 24)])
def test_it_is_as_good_as_the_rule_for_one_f_one_b(p, m):
    """BPipe's bound on both of a pair, and no more evictions."""
    plain = build('1f1b', p, m)
    schedule = evicted(plain, [float(bound(p))] * p)
    check(schedule)
    assert max(peak(schedule, Costs.uniform(plain.placement))[: p // 2]) <= bound(p)
    known = sum(q.kind == 'E' for _, q in build('bpipe', p, m))
    assert 0 < sum(q.kind == 'E' for _, q in schedule) <= known


# by ranks: evictions at m = p, 2p, 3p + 1, the least that two rules of our own needed before
FEWEST = {
    4: (2, 4, 6),
    5: (1, 3, 5),
    6: (4, 10, 15),
    7: (3, 8, 13),
    8: (7, 17, 28),
    10: (11, 26, 43),
    12: (16, 39, 61),
    14: (22, 51, 84),
    16: (29, 67, 108),
}


@pytest.mark.parametrize('p', FEWEST)
def test_all_ranks_meet_the_bound_of_bpipe(p):
    """In 27 sizes, partners included, with no more evictions than were known to do."""
    for m, fewest in zip((p, 2 * p, 3 * p + 1), FEWEST[p], strict=True):
        schedule = evicted(build('1f1b', p, m), [float(bound(p))] * p)
        check(schedule)
        assert max(peak(schedule, Costs.uniform(schedule.placement))) <= bound(p), m
        assert sum(q.kind == 'E' for _, q in schedule) <= fewest, m


def test_nothing_moves_where_there_is_room():
    plain = build('zb-v', 4, 8)
    assert evicted(plain, [4.0] * 4) is plain


def test_the_rank_in_the_middle_is_its_own_partner():
    plain = build('gpipe', 5, 8)
    schedule = evicted(plain, [4.0] * 5)
    check(schedule)
    assert {rank for rank, p in schedule if p.kind == 'E'} == {0, 1, 3, 4}


@pytest.mark.parametrize('rules', [{}, {'synchronises': True}, {'in_order': True}])
@pytest.mark.parametrize(('name', 'evicting'), [('zb-v', {0, 1}), ('zb-h1', {0})])
def test_whatever_rank_acts_next_it_ends(name, evicting, rules):
    """One or both of a pair evict, in other orders than 1F1B's: by looking at every state."""
    plain = build(name, 2, 4)
    schedule = evicted(plain, [1.5, 1.5])
    assert {rank for rank, p in schedule if p.kind == 'E'} == evicting
    assert programs_always_end(check(schedule).programs, **rules)


def test_beside_what_runs_again_and_what_is_on_the_host():
    """Three chunks, one of each."""
    plain = build('interleaved', 4, 8, num_chunks=3)
    costs = with_copies(Costs.uniform(plain.placement), 0.2, 'EK')
    costs = costs.with_amounts(input=(0.01,) * 12)
    schedule = with_recomputation(plain, range(4, 8), costs)
    schedule = with_offload(schedule, range(8, 12), costs)
    held = peak(schedule, costs)
    schedule = with_eviction(schedule, range(4), costs, [0.7 * held[0], *(held[1:])])
    check(schedule)
    assert {p.kind for _, p in schedule} >= {*'ROLEK'}
    assert {p.stage for _, p in schedule if p.kind == 'E'} == {0}
    assert peak(schedule, costs)[0] < held[0]


def test_of_what_runs_again_it_is_the_input():
    plain = build('gpipe', 2, 6)
    costs = Costs.uniform(plain.placement).with_amounts(input=(0.25, 0.25))
    schedule = with_eviction(with_recomputation(plain, [0], costs), [0], costs, [1.75, 9.0])
    check(schedule)
    assert any(p.kind == 'E' for _, p in schedule)
    assert peak(schedule, costs)[0] <= 1.75 < peak(with_recomputation(plain, [0], costs), costs)[0]


def test_passes_that_run_as_one_stay_so():
    first = [*(Pass('F', 0, k) for k in range(5)), Together((Pass('F', 0, 5), Pass('BW', 0, 0)))]
    first += [Pass('BW', 0, k) for k in range(1, 6)]
    second = [q for k in range(6) for q in (Pass('F', 1, k), Pass('BW', 1, k))]
    plain = Schedule.of('by twos', Placement.loop(2), 6, [first, second])
    schedule = evicted(plain, [5.0, 9.0])
    check(schedule)
    assert any(p.kind == 'E' for _, p in schedule)
    joined = {schedule.passes[rank][at : at + 2] for rank, at in schedule.together}
    assert joined == {(Pass('F', 0, 5), Pass('BW', 0, 0))}
