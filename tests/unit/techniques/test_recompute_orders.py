"""R where the rank would idle: as GPipe's paper has it, and nothing else moves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Pass, Placement, Schedule, Together
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build, names
from megatron_zbpp.techniques.evict.place import bound
from megatron_zbpp.techniques.offload.place import offloaded
from megatron_zbpp.techniques.recompute.place import recomputed


@pytest.mark.parametrize('amount', ['half', 'all', '1'])
@pytest.mark.parametrize('name', names(plain=True))
def test_any_schedule(name, amount):
    """Valid, no pass moves but R, no rank holds more; less where W is right behind B."""
    plain = build(name, 4, 8)
    schedule = recomputed(plain, amount)
    check(schedule)
    others = tuple(tuple(p for p in order if p.kind != 'R') for order in schedule.passes)
    assert others == plain.passes
    costs = Costs.uniform(plain.placement)
    for after, before in zip(peak(schedule, costs), peak(plain, costs), strict=True):
        assert after <= before
    again = {p.stage for _, p in schedule if p.kind == 'R'}
    assert all(plain.placement.chunk_of(stage) == 0 for stage in again) or amount == 'all'


def test_gpipe_as_in_its_paper():
    """The first R of each rank is in the bubble: m (F + R + B + W) and the bubble of before.

    On a rank are m inputs and one activation.
    """
    p, m = 4, 8
    schedule = recomputed(build('gpipe', p, m), 'all')
    share = 0.1
    costs = Costs.uniform(schedule.placement)
    costs = Costs.of(
        costs.times['F'], costs.times['B'], costs.times['W'], amounts={'input': (share,) * p}
    )
    assert simulate(schedule, costs).makespan == m * 4 + (p - 1) * 3
    assert max(peak(schedule, costs)) == pytest.approx((m - 1) * share + 1)
    assert all(order.index(Pass('R', s, 0)) == m for s, order in enumerate(schedule.passes))


def test_what_runs_back_at_once_keeps_what_it_saves():
    """The last stage of 1F1B has nothing to gain."""
    schedule = recomputed(build('1f1b', 4, 8), 'all')
    assert {p.stage for _, p in schedule if p.kind == 'R'} == {0, 1, 2}
    assert schedule.name == '1f1b + recompute all'


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v', 'interleaved'])
def test_bubbles_first(name):
    """Never later than with each R right before its B, and earlier where there is a gap."""
    plain = build(name, 8, 16)
    schedule = recomputed(plain, 'all')
    orders = tuple(_at_once(order) for order in schedule.passes)
    at_once = replace(schedule, passes=orders)
    check(at_once)
    costs = Costs.uniform(plain.placement)
    assert simulate(schedule, costs).makespan <= simulate(at_once, costs).makespan
    assert max(peak(schedule, costs)) <= max(peak(at_once, costs))


def _at_once(order):
    """R moved to right before its backward."""
    again = {(p.stage, p.microbatch): p for p in order if p.kind == 'R'}
    found = []
    for p in order:
        if p.kind in ('B', 'BW') and (p.stage, p.microbatch) in again:
            found.append(again[p.stage, p.microbatch])
        if p.kind != 'R':
            found.append(p)
    return tuple(found)


def test_an_idle_rank_recomputes_early():
    """Where a long message leaves a gap, R runs in it, before passes that are not its own B."""
    plain = build('zb-h1', 4, 8)
    costs = Costs.uniform(plain.placement, comm=3.0)
    schedule = recomputed(plain, 'all', costs)
    check(schedule)
    early = [
        p
        for order in schedule.passes
        for p, q in itertools.pairwise(order)
        if p.kind == 'R' and (q.kind not in ('B', 'BW') or q.microbatch != p.microbatch)
    ]
    assert early


def test_passes_together():
    """Those that an R comes between run apart."""
    order = [*(Pass('F', 0, k) for k in range(4)), Together((Pass('F', 0, 4), Pass('BW', 0, 0)))]
    order += [Pass('BW', 0, k) for k in range(1, 5)]
    schedule = Schedule.of('by twos', Placement.loop(1), 5, [order])
    moved = recomputed(schedule, 'all')
    check(moved)
    assert not moved.together
    first = Schedule.of(
        'two', Placement.loop(1), 2, [[Together((Pass('F', 0, 0), Pass('F', 0, 1))), *order[5:6]]]
    )
    assert first.together


def test_chunks_hold_less_by_half():
    plain = build('interleaved', 4, 8)
    costs = Costs.uniform(plain.placement)
    half, every = (max(peak(recomputed(plain, amount), costs)) for amount in ('half', 'all'))
    assert every < half < max(peak(plain, costs))
    assert live(recomputed(plain, 'half'), costs)[0][-1] == 0


@pytest.mark.parametrize(('p', 'm'), [(4, 8), (5, 9), (8, 16)])
def test_what_is_on_a_partner_meanwhile_is_the_input(p, m):
    """Both of a pair hold at most the bound, of inputs, and one activation more."""
    plain = build('bpipe', p, m)
    schedule = recomputed(plain, 'all')
    check(schedule)
    moved = tuple(tuple(q for q in order if q.kind != 'R') for order in schedule.passes)
    assert moved == plain.passes
    share = 0.1
    costs = Costs.uniform(plain.placement).with_amounts(input=(share,) * p)
    held = peak(schedule, costs)
    assert max(held) <= (bound(p) - 1) * share + 1 + 1e-9
    assert held[0] < peak(recomputed(build('1f1b', p, m), 'all'), costs)[0]
    of_plain = recomputed(build('1f1b', p, m), 'all')
    assert simulate(schedule, costs).makespan == simulate(of_plain, costs).makespan


def test_what_makes_no_sense():
    moved = offloaded(build('1f1b', 4, 8), 'all')
    with pytest.raises(ValueError, match=r'has offload already, and copies were given times'):
        recomputed(moved, 'all')
    with pytest.raises(ValueError, match=r"recompute of 'some': give 'half', 'all' or a number"):
        recomputed(build('1f1b', 4, 8), 'some')
    with pytest.raises(ValueError, match=r'recompute of 3 chunks: a rank has 2'):
        recomputed(build('zb-v', 4, 8), 3)


def test_an_order_that_waits_in_a_circle_is_told_by_the_check():
    orders = [[Pass('BW', 0, 0), Pass('F', 0, 0)], [Pass('F', 1, 0), Pass('BW', 1, 0)]]
    schedule = recomputed(Schedule.of('a circle', Placement.loop(2), 1, orders), 'all')
    with pytest.raises(ValueError, match=r'deadlock|before'):
        check(schedule)
