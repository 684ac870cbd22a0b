"""PipeOffload: the paper's order, the comb of copies, and memory that holds whatever times are."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
from grids import grid
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import by_hand, texts, without
from published import published

from megatron_zbpp import Costs, Pass, Placement, Schedule, build, check, simulate
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.program import Begin
from megatron_zbpp.ir import BW, chain
from megatron_zbpp.ir.graph import R
from megatron_zbpp.schedules import names
from megatron_zbpp.techniques.base import copy_ratio, with_copies
from megatron_zbpp.techniques.evict import bound, with_eviction
from megatron_zbpp.techniques.offload import (
    Comb,
    offload,
    offloaded,
    po,
    po_f,
    po_h,
    transfers,
    with_transfers,
)
from megatron_zbpp.techniques.recompute import recompute, recomputed


def copying(num_stages: int, k: float) -> Costs:
    """F = B = W = 1, and both ways of a copy take k times as long as the three."""
    ones = (1.0,) * num_stages
    return Costs.of(ones, ones, ones, times=dict.fromkeys('OL', (1.5 * k,) * num_stages))


ROWS = published(__file__, 'PipeOffload')


@pytest.mark.parametrize(
    'row', [*ROWS[:-1], pytest.param(ROWS[-1], marks=pytest.mark.full)], ids=str
)
def test_numbers_of_the_paper(row):
    """Of PO, PO-H and PO-F; and of GIS and GIS-H, to which it is compared."""
    p, v, bubble, held, on_grid, halves, fulls, hosts = row
    work = 3 * v * 2 * p
    costs = copying(p * v, 1)

    def found(schedule: Schedule) -> tuple[float, float]:
        return simulate(schedule, costs).makespan - work, max(peak(schedule, costs))

    assert found(po(p, 2 * p, v)) == (bubble, held)
    gis, gis_h = (build(name, p, 2 * p, num_chunks=v) for name in ('gis', 'gis-h'))
    assert found(gis) == (2 * (p - 1), p * v)
    assert found(gis_h) == (2 * (p - 1) + (v - 1) * p // 2, p * (v + 1) // 2)
    for make, peaks, host in ((po_h, halves, hosts[0]), (po_f, fulls, hosts[1])):
        for k, expected in zip((0.5, 1), peaks, strict=True):
            costs = copying(p * v, k)
            schedule = make(p, 2 * p, v, costs)
            assert max(peak(schedule, costs)) == expected
            assert host - 2 <= max(map(max, live(schedule, costs, 'host'))) <= host
            # between what order alone takes and the grid with idle slots idle
            assert bubble <= simulate(schedule, costs).makespan - work <= on_grid


@pytest.mark.parametrize('v', range(1, 6))
@pytest.mark.parametrize('p', [1, 2, 3, 4, 6, 9, 16])
def test_no_two_passes_in_a_slot(p, v):
    schedule = po(p, 3, v)
    check(schedule)
    check(po_f(p, 3, v))
    assert max(map(len, schedule.passes)) == 9 * v


@pytest.mark.parametrize(
    ('name', 'held', 'expected'), [('gis', 16, {0.5: 8, 1: 11}), ('gis-h', 12, {0.5: 7})]
)
def test_offload_of_other_families(name, held, expected):
    """Half of GIS at d = 8, v = 2: linear at best, for it walks in groups."""
    plain = build(name, 8, 16)
    costs = copying(16, 1)
    assert max(peak(plain, costs)) == held
    for k, less in expected.items():
        costs = copying(16, k)
        spans = simulate(plain, costs).spans
        schedule = with_transfers(plain, spans, range(8), 1.5 * k, 1.0)
        check(schedule)
        assert max(peak(schedule, costs)) <= less


@settings(max_examples=30)
@given(st.data())
def test_memory_holds_whatever_the_times_are(data):
    """Held in time, as copies and passes really run: never more than the order says."""
    numbers = st.sampled_from([0.1, 0.5, 1.0, 3.0])
    p, v = data.draw(st.sampled_from([(2, 2), (3, 2)]))
    schedule = po_f(p, data.draw(st.integers(1, 8)), v)
    drawn = {kind: tuple(data.draw(numbers) for _ in range(p * v)) for kind in 'FBWOL'}
    ones = (1.0,) * (p * v)
    costs = Costs.of(ones, ones, ones, 0.2).with_times(**drawn)
    timeline = simulate(schedule, costs)
    for order, spans, most in zip(
        schedule.passes, timeline.spans, peak(schedule, costs), strict=True
    ):
        # what frees comes first of what is at one time
        events = sorted(
            (start, 1) if q.kind in 'FL' else (end, -1)
            for q, (start, end) in zip(order, spans, strict=True)
            if q.kind in 'FLOW'
        )
        assert max(accumulate(change for _, change in sorted(events))) <= most


@pytest.mark.parametrize(('amount', 'make'), [('half', po_h), ('all', po_f), ('1', po_h)])
def test_offload_of_po_is_the_papers(amount, make):
    moved = offloaded(build('po', 4, 8), amount)
    assert moved.passes == make(4, 8).passes
    assert moved.name == f'po + offload {amount}'


@pytest.mark.parametrize('k', [0.3, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize('name', ['po', 'interleaved', '1f1b', 'gis'])
def test_offload_of_what_is_free(name, k):
    """All of it where k is at most 1, else no more than 1/k, the first chunks; and no rank more."""
    plain = build(name, 8, 24)
    costs = with_copies(Costs.uniform(plain.placement), k)
    moved, every = (offloaded(plain, amount, costs) for amount in ('auto', 'all'))
    check(moved)
    if k <= 1:
        assert moved.passes == every.passes
    out, forwards = ([p for _, p in moved if p.kind == kind] for kind in 'OF')
    assert 0 < len(out) <= max(1.0, 1 / k) * len(forwards)
    chunks = {plain.placement.chunk_of(p.stage) for p in out}
    assert max(chunks) < plain.placement.num_chunks / max(1, k)
    assert max(peak(moved, costs)) <= max(peak(every, costs))


def test_what_is_never_free_stays():
    plain = build('zb-v', 4, 12)
    costs = with_copies(Costs.uniform(plain.placement), 1e9)
    assert copy_ratio(costs) == pytest.approx(1e9)
    assert not [p for _, p in offloaded(plain, 'auto', costs) if p.kind in 'OL']


def test_copies_in_their_order():
    """One stream: out behind its F, but not before the copy in that its order has before it."""
    schedule = po_f(4, 8)
    for rank, program in enumerate(lower(schedule)):
        copies = [p for p in schedule.passes[rank] if p.kind in 'OL']
        begun = [
            i.leaving if isinstance(i, Begin) else i
            for i in program
            if isinstance(i, Begin) or (isinstance(i, Pass) and i.kind == 'L')
        ]
        assert begun == copies
        for p in copies:
            if p.kind == 'O':
                at = program.index(Begin(p))
                assert program.index(p._replace(kind='F')) < at < program.index(p)


def test_recompute_passes_wait_for_what_was_on_the_host():
    graph = offload(recompute(chain(1), [0]), [0])
    schedule = by_hand(1, 2, '0F0 0O0 0L0 0R0 0B0 0W0 0F1 0R1 0B1 0W1', graph=graph)
    check(schedule)
    assert [str(p) for p in schedule.predecessors(Pass.parse('0R0'))] == ['0L0']
    assert [str(p) for p in schedule.predecessors(Pass.parse('0R1'))] == ['0F1']


def test_slots():
    """And what has no time to go stays."""
    comb = Comb(1.0, 2.0)
    assert (comb.out(0), comb.into(0), comb.out(1)) == ((1, 3), (3, 5), (5, 7))
    assert (comb.first_out(0), comb.first_out(1), comb.first_out(1.5)) == (0, 0, 1)
    assert (comb.last_in(4.9), comb.last_in(5), comb.last_in(9)) == (-1, 0, 1)
    first, second, short = (Pass('F', 0, m) for m in range(3))
    lives = {first: (0.0, 30.0), second: (1.0, 31.0), short: (2.0, 6.0)}
    found = transfers(Comb(0.0, 2.0), lives, 1.0)
    assert found == {first: ((0, 2), (22, 24)), second: ((4, 6), (26, 28))}


def test_groups_grow_with_the_share_of_forwards():
    """Where F alone is most of the work, half as many microbatches do not feed all ranks."""
    second = Pass('F', 8, 0)
    schedule = po(8, 16, 2, Costs.of((1.0,) * 16, (0.1,) * 16, (0.1,) * 16))
    assert (po(8, 16).passes[0].index(second), schedule.passes[0].index(second)) == (3, 4)
    check(schedule)


# ---- R where the rank would idle, as in GPipe's paper, and nothing else moves.


def test_gpipe_as_in_its_paper():
    """The first R of each rank is in the bubble: m (F + R + B + W) and the bubble of before.

    On a rank are m inputs and one activation.
    """
    p, m, share = 4, 8, 0.1
    schedule = recomputed(build('gpipe', p, m), 'all')
    costs = Costs.uniform(schedule.placement).with_amounts(input=(share,) * p)
    assert simulate(schedule, costs).makespan == m * 4 + (p - 1) * 3
    assert max(peak(schedule, costs)) == pytest.approx((m - 1) * share + 1)
    assert all(order.index(Pass('R', s, 0)) == m for s, order in enumerate(schedule.passes))
    # the last stage of 1F1B has nothing to gain
    schedule = recomputed(build('1f1b', 4, 8), 'all')
    assert {p.stage for _, p in schedule if p.kind == 'R'} == {0, 1, 2}
    assert schedule.name == '1f1b + recompute all'


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v', 'interleaved'])
def test_bubbles_first(name):
    """Never later than with each R right before its B, and earlier where there is a gap."""
    plain = build(name, 8, 16)
    schedule = recomputed(plain, 'all')
    orders = []
    for order in schedule.passes:
        again = {(p.stage, p.microbatch): p for p in order if p.kind == 'R'}
        back = {p: again.get((p.stage, p.microbatch)) for p in order if p.kind in ('B', 'BW')}
        moved = ((back.get(p), p) for p in order if p.kind != 'R')
        orders.append(tuple(p for pair in moved for p in pair if p is not None))
    at_once = replace(schedule, passes=tuple(orders))
    check(at_once)
    costs = Costs.uniform(plain.placement)
    assert simulate(schedule, costs).makespan <= simulate(at_once, costs).makespan
    assert max(peak(schedule, costs)) <= max(peak(at_once, costs))


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
    assert without(schedule, 'R') == plain.passes
    share = 0.1
    costs = Costs.uniform(plain.placement).with_amounts(input=(share,) * p)
    held = peak(schedule, costs)
    assert max(held) <= (bound(p) - 1) * share + 1 + 1e-9
    assert held[0] < peak(recomputed(build('1f1b', p, m), 'all'), costs)[0]
    of_plain = recomputed(build('1f1b', p, m), 'all')
    assert simulate(schedule, costs).makespan == simulate(of_plain, costs).makespan


# ---- Merak and Varuna: the last rank runs no forward again, and R comes before its gradient does.


@pytest.mark.parametrize('name', ['merak', 'varuna'])
@grid(p=(4, 2, 7), m=(12, 3))
def test_all_ranks_but_the_last_run_forwards_again(name, p, m):
    for rank, order in enumerate(build(name, p, m).passes):
        again = [each.microbatch for each in order if each.kind == R]
        assert again == ([] if rank == p - 1 else list(range(m)))


@pytest.mark.parametrize(
    ('name', 'comm', 'again', 'back'),
    [('merak', 0, 5, 6), ('varuna', 0, 5, 6), ('varuna', 0.5, 7, 8)],
)
def test_r_ends_when_the_gradient_arrives(name, comm, again, back):
    """On the rank before the last, whose first gradient is there after F of two ranks and a BW.

    Of Varuna with messages of a half it comes one later, and so does R.
    """
    costs = Costs.uniform(Placement.loop(4), comm=comm)
    schedule = build(name, 4, 8, costs=costs) if comm else build(name, 4, 8)
    ran = simulate(schedule, costs).by_pass
    assert ran[Pass('R', 2, 0)] == (again, back)
    assert ran[Pass('BW', 2, 0)] == (back, back + 2)


@grid(p=(4, 8), more=(0, 5, 12))
def test_merak_is_shorter_than_1f1b_that_recomputes(p, more):
    """By one F: the critical path is one rank shorter, and R is out of the way."""
    m, plain = 2 * p + more, build('1f1b', p, 2 * p + more)
    costs = Costs.uniform(plain.placement)
    others = simulate(recomputed(plain, 'all'), costs).makespan
    assert simulate(build('merak', p, m), costs).makespan == others - 1
    assert others - 1 == 4 * m + 3 * (p - 2)


def test_varuna_runs_forwards_where_1f1b_waits():
    """Rank 0 has all forwards behind it before its first backward; 1F1B has p of them."""
    assert [p.kind for p in build('varuna', 4, 8).passes[0]].index(R) == 8
    assert [p.kind for p in build('1f1b', 4, 8).passes[0]].index(BW) == 4


# ---- Whatever the schedule: no pass moves, no rank holds more.


def evicted(schedule: Schedule) -> Schedule:
    """The first rank may hold three quarters of what it does."""
    costs = Costs.uniform(schedule.placement)
    before = peak(schedule, costs)
    limits = [0.75 * before[0], *before[1:]]
    return with_eviction(schedule, range(schedule.num_stages), costs, limits)


# by name: what makes it, and its passes
TECHNIQUES: dict[str, tuple[Callable[[Schedule], Schedule], str]] = {
    **{f'recompute {n}': (partial(recomputed, amount=n), 'R') for n in ('half', 'all', '1')},
    **{f'offload {n}': (partial(offloaded, amount=n), 'OL') for n in ('half', 'all', 'auto')},
    'evict': (evicted, 'EK'),
}
LESS = ('1f1b', 'interleaved')  # with W right behind B


@pytest.mark.parametrize('name', names(plain=True))
@pytest.mark.parametrize('technique', TECHNIQUES)
def test_any_schedule(technique, name):
    if (technique, name) == ('evict', '2bp'):
        return  # it holds the most behind its last B, for W: none of that can leave
    make, kinds = TECHNIQUES[technique]
    plain = build(name, 4, 8)
    made, costs = make(plain), Costs.uniform(plain.placement)
    check(made)
    assert without(made, kinds) == plain.passes
    after, before = peak(made, costs), peak(plain, costs)
    assert all(a <= b for a, b in zip(after[:3], before[:3], strict=True))
    assert after[3] <= before[3] or technique == 'evict'
    stages = {p.stage for _, p in made if p.kind in kinds}
    if technique == 'evict':
        assert {made.rank_of(p) for _, p in made if p.kind in kinds} <= {0} and after[
            1:3
        ] == before[1:3]
        if stages:
            assert after[0] < before[0] and after[3] > before[3]
            assert simulate(made, costs).makespan == simulate(plain, costs).makespan
    elif technique.startswith('recompute') and technique != 'recompute all':
        assert all(plain.placement.chunk_of(stage) == 0 for stage in stages)
    elif technique == 'offload all' and name in LESS:
        assert max(after) < max(before)


@pytest.mark.parametrize('technique', ['recompute all', 'offload all', 'evict'])
def test_passes_that_run_as_one(technique):
    """They stay so, but those that an R comes between."""
    make, kinds = TECHNIQUES[technique]
    order = ' '.join(f'{{0}}F{k}' for k in range(5)) + ' ({0}F5&{0}BW0) '
    order += ' '.join(f'{{0}}BW{k}' for k in range(1, 6))
    schedule = by_hand(2, 6, order.format(0), ' '.join(f'1F{k} 1BW{k}' for k in range(6)))
    made = make(schedule)
    check(made)
    assert any(p.kind in kinds for _, p in made)
    pairs = [' '.join(map(str, made.passes[rank][at : at + 2])) for rank, at in made.together]
    assert pairs == ([] if kinds == 'R' else ['0F5 0BW0'])
    assert texts(schedule)[0].startswith('0F0 0F1')
