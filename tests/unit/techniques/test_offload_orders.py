"""PipeOffload: the paper's order, the comb of copies, and memory that holds whatever times are."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zbpp.analysis.checker import ScheduleError, check
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.program import Begin
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Pass, Placement, Schedule, Together
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build
from megatron_zbpp.schedules.pipe_offload import po
from megatron_zbpp.techniques.base import copy_ratio, with_copies
from megatron_zbpp.techniques.offload.graph import offload
from megatron_zbpp.techniques.offload.place import (
    Comb,
    offloaded,
    po_f,
    po_h,
    transfers,
    with_transfers,
)
from megatron_zbpp.techniques.recompute.graph import recompute


def copying(num_stages: int, k: float) -> Costs:
    """F = B = W = 1, and both ways of a copy take k times as long as the three."""
    ones = (1.0,) * num_stages
    copies = dict.fromkeys('OL', (1.5 * k,) * num_stages)
    return Costs.of(ones, ones, ones, times=copies)


# p, v: bubble and peak of PO as it stands, bubble on its grid; peaks in chunks of PO-H at k = .5
# and 1, of PO-F at both, and on the host if that is freed after B (ours is before)
ROWS = {
    (4, 2): (9, 7, 24, (3, 4), (2, 4), (5, 7)),
    (4, 4): (18, 11, 42, (4, 5), (3, 4), (8, 11)),
    (8, 2): (23, 13, 48, (5, 6), (2, 4), (9, 13)),
    (8, 3): (34, 16, 63, (4, 5), (3, 4), (14, 16)),
    (8, 4): (41, 23, 102, (8, 9), (2, 4), (17, 23)),
    (8, 5): (56, 24, 105, (6, 8), (3, 4), (20, 24)),
    (16, 2): (51, 25, 96, (9, 10), (3, 4), (17, 25)),
    (16, 3): (74, 32, 135, (7, 8), (3, 4), (27, 32)),
}


@pytest.mark.parametrize(
    'row', [*list(ROWS)[:-1], pytest.param((16, 3), marks=pytest.mark.full)], ids=str
)
def test_numbers_of_the_paper(row):
    (p, v), (bubble, held, on_grid, halves, fulls, hosts) = row, ROWS[row]
    work = 3 * v * 2 * p
    plain = po(p, 2 * p, v)
    costs = copying(p * v, 1)
    timeline = simulate(plain, costs)
    assert (timeline.makespan - work, max(peak(plain, costs))) == (bubble, held)
    for make, peaks, host in ((po_h, halves, hosts[0]), (po_f, fulls, hosts[1])):
        for k, expected in zip((0.5, 1), peaks, strict=True):
            costs = copying(p * v, k)
            schedule = make(p, 2 * p, v, costs)
            assert max(peak(schedule, costs)) == expected
            assert host - 2 <= max(map(max, live(schedule, costs, 'host'))) <= host
            # between what order alone takes and the grid with idle slots idle
            assert bubble <= simulate(schedule, costs).makespan - work <= on_grid


@pytest.mark.parametrize(('p', 'v'), ROWS)
def test_what_it_is_compared_with(p, v):
    """GIS and GIS-H: bubble and memory beside those of the table."""
    costs = copying(p * v, 1)
    for name, expected in (
        ('gis', (2 * (p - 1), p * v)),
        ('gis-h', (2 * (p - 1) + (v - 1) * p // 2, p * (v + 1) // 2)),
    ):
        schedule = build(name, p, 2 * p, num_chunks=v)
        bubble = simulate(schedule, costs).makespan - 3 * v * 2 * p
        assert (bubble, max(peak(schedule, costs))) == expected


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
    drawn = {
        kind: tuple(data.draw(numbers) for _ in range(p * v)) for kind in ('F', 'B', 'W', 'O', 'L')
    }
    forward, backward, weight = (drawn[kind] for kind in 'FBW')
    copies = {kind: drawn[kind] for kind in 'OL'}
    costs = Costs.of(forward, backward, weight, 0.2, times=copies)
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
        held = accumulate(change for _, change in sorted(events))
        assert max(held) <= most


@pytest.mark.parametrize(('amount', 'make'), [('half', po_h), ('all', po_f), ('1', po_h)])
def test_offload_of_po_is_the_papers(amount, make):
    moved = offloaded(build('po', 4, 8), amount)
    assert moved.passes == make(4, 8).passes
    assert moved.name == f'po + offload {amount}'


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v', 'interleaved', 'dualpipe-v', 'gpipe'])
def test_offload_of_any_schedule(name):
    """Valid, no pass is lost or moved; no rank holds more, and less with W right behind B."""
    plain = build(name, 4, 12)
    moved = offloaded(plain, 'all')
    check(moved)
    stay = tuple(tuple(p for p in order if p.kind not in 'OL') for order in moved.passes)
    assert stay == plain.passes
    costs = Costs.uniform(plain.placement)
    less = max(peak(plain, costs)) - max(peak(moved, costs))
    assert less > 0 if name in ('1f1b', 'interleaved') else less >= 0


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


def test_passes_together_stay_together():
    orders = ['0F0 0F1 0F2 0F3', '1F0']
    first = [Pass.parse(text) for text in orders[0].split()]
    both = Together((Pass.parse('0F4'), Pass.parse('0BW0')))
    rest = [Pass.parse(f'0BW{k}') for k in range(1, 5)]
    schedule = Schedule.of('by twos', Placement.loop(1), 5, [[*first, both, *rest]])
    moved = offloaded(schedule, 'all', ratio=0.2)
    check(moved)
    order = moved.passes[0]
    ((_rank, at),) = moved.together
    assert order[at : at + 2] == both.passes and any(p.kind == 'O' for p in order)


@pytest.mark.parametrize(
    ('amount', 'says'),
    [
        (0, 'offload of 0: give'),
        ('some', "'some': give 'half'"),
        (3, 'a rank has 2'),
        (True, 'True'),
    ],
)
def test_amounts_that_make_no_sense(amount, says):
    with pytest.raises(ValueError, match=says):
        offloaded(build('zb-v', 2, 4), amount)


def test_offload_is_asked_for_once():
    with pytest.raises(ValueError, match=r'offload: .* has offload already, and it is'):
        offloaded(offloaded(build('zb-v', 2, 4), 'all'), 'all')
    with pytest.raises(ValueError, match='give more than 0'):
        offloaded(build('zb-v', 2, 4), 'all', ratio=0)


def test_copies_in_their_order():
    """One stream: out behind its F, but not before the copy in that its order has before it."""
    schedule = po_f(4, 8)
    for rank, program in enumerate(lower(schedule)):
        copies = [p for p in schedule.passes[rank] if p.kind in 'OL']
        begun = [i.leaving if isinstance(i, Begin) else i for i in program]
        begun = [
            p
            for i, p in zip(program, begun, strict=True)
            if isinstance(i, Begin) or (isinstance(i, Pass) and i.kind == 'L')
        ]
        assert begun == copies
        for p in copies:
            if p.kind == 'O':
                at = program.index(Begin(p))
                assert program.index(p._replace(kind='F')) < at < program.index(p)


def test_copies_and_passes_wait_for_each_other():
    graph = offload(Schedule.of('', Placement.loop(1), 1, [[]]).graph, [0])
    order = map(Pass.parse, '0F0 0F1 0O0 0F2 0L0 0B0 0W0 0B1 0W1 0B2 0W2'.split())
    schedule = Schedule.of('by hand', Placement.loop(1), 3, [order], graph)
    check(schedule)
    ones = (1.0,)
    costs = Costs.of(ones, ones, ones, times={'O': (2.5,), 'L': (0.5,)})
    spans = dict(zip(map(str, schedule.passes[0]), simulate(schedule, costs).spans[0], strict=True))
    assert spans['0O0'] == (1, 3.5)  # from the end of its F on, beside the next
    assert spans['0F2'] == (3.5, 4.5)  # has waited for the place
    assert spans['0L0'] == (4.5, 5)  # its place is behind F2
    assert spans['0B0'] == (5, 6)


@pytest.mark.parametrize(
    ('order', 'says'),
    [
        ('0F0 0O0 0BW0', 'never does the load of microbatch 0'),
        ('0F0 0L0 0BW0', 'never does the offload of microbatch 0'),
        ('0F0 0O0 0BW0 0L0', '0BW0 on rank 0 comes before 0L0'),
        ('0BW0 0F0', '0BW0 on rank 0 comes before 0F0'),
        ('0F0 0O0 0O0 0L0 0BW0', 'repeats the offload'),
    ],
)
def test_a_copy_is_whole_or_not_at_all(order, says):
    graph = offload(Schedule.of('', Placement.loop(1), 1, [[]]).graph, [0])
    placement = Placement.loop(1)
    check(Schedule.of('', placement, 1, [map(Pass.parse, ('0F0', '0BW0'))], graph))
    with pytest.raises(ScheduleError, match=says):
        check(Schedule.of('', placement, 1, [map(Pass.parse, order.split())], graph))


def test_who_is_needed_where_nothing_is_moved():
    graph = offload(recompute(Schedule.of('', Placement.loop(1), 1, [[]]).graph, [0]), [0])
    moved = '0F0 0O0 0L0 0R0 0B0 0W0'
    stays = '0F1 0R1 0B1 0W1'
    order = map(Pass.parse, f'{moved} {stays}'.split())
    schedule = Schedule.of('', Placement.loop(1), 2, [order], graph)
    check(schedule)
    assert [str(p) for p in schedule.predecessors(Pass.parse('0R0'))] == ['0L0']
    assert [str(p) for p in schedule.predecessors(Pass.parse('0R1'))] == ['0F1']


def test_slots():
    comb = Comb(1.0, 2.0)
    assert (comb.out(0), comb.into(0), comb.out(1)) == ((1, 3), (3, 5), (5, 7))
    assert (comb.first_out(0), comb.first_out(1), comb.first_out(1.5)) == (0, 0, 1)
    assert (comb.last_in(4.9), comb.last_in(5), comb.last_in(9)) == (-1, 0, 1)


def test_what_has_no_time_stays():
    first, second, short = (Pass('F', 0, m) for m in range(3))
    lives = {first: (0.0, 30.0), second: (1.0, 31.0), short: (2.0, 6.0)}
    found = transfers(Comb(0.0, 2.0), lives, 1.0)
    assert found == {first: ((0, 2), (22, 24)), second: ((4, 6), (26, 28))}


def test_groups_grow_with_the_share_of_forwards():
    """Where F alone is most of the work, half as many microbatches do not feed all ranks."""
    long = Costs.of((1.0,) * 16, (0.1,) * 16, (0.1,) * 16)
    second = Pass('F', 8, 0)
    schedule = po(8, 16, 2, long)
    assert (po(8, 16).passes[0].index(second), schedule.passes[0].index(second)) == (3, 4)
    check(schedule)
