"""Slices of sequences: orders of every family, their numbers, and what must not be."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from math import inf
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rivals import of_two_chunks

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW, B, F, Pass, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.grid import ScheduleError
from megatron_zbpp.ir.placement import Placement
from megatron_zbpp.planner import budget
from megatron_zbpp.planner.cp_sat import solve
from megatron_zbpp.planner.ends import replay_whole
from megatron_zbpp.planner.lower_bounds import lower_bound
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.schedules import Sizes, build, find, names, own_families
from megatron_zbpp.techniques.slices import place
from megatron_zbpp.techniques.slices.graph import Slicing
from megatron_zbpp.techniques.slices.place import by_rule, cut, in_slices, unsuited

BY_NAME = {
    'seq1f1b': '1f1b',
    'seq1f1b-zb': 'zb-h1',
    'seq-zb-v': 'zb-v',
    'seq1f1b-interleaved': 'interleaved',
}
# Of `docs`' specification: bubble of the makespan and peak of Seq1F1B, of it with ZB-H1;
# of Seq-ZB-V the bubble of the makespan, of the window, and the peak; of Seq1F1B-I as of the first.
TABLE = {
    (4, 8, 1): ((9, 4), (3, 4), (1.5, 0, 4), (4.5, 5.5)),
    (4, 8, 2): ((4.5, 2.5), (1.5, 2.5), (0.75, 0, 2.5), (2.25, 3)),
    (4, 8, 4): ((2.25, 1.75), (0.75, 1.75), (0.375, 0, 1.75), (1.125, 1.75)),
    (4, 8, 8): ((1.125, 1.375), (0.375, 1.375), (0.1875, 0, 1.375), (0.5625, 1.375)),
    (8, 16, 1): ((21, 8), (7, 8), (3.5, 0, 8), (10.5, 11.5)),
    (8, 16, 2): ((10.5, 4.5), (3.5, 4.5), (1.75, 0, 4.5), (5.25, 6)),
    (8, 16, 4): ((5.25, 2.75), (1.75, 2.75), (0.875, 0, 2.75), (2.625, 3.25)),
    (8, 16, 8): ((2.625, 1.875), (0.875, 1.875), (0.4375, 0, 1.875), (1.3125, 1.875)),
    (8, 16, 16): (None, None, None, (0.65625, 1.4375)),
    (8, 4, 1): ((21, 4), (11, 4), (7.5, 7.5, 4), None),
    (8, 4, 2): ((10.5, 4), (4, 4), (2.25, 2, 4), (5.25, 4)),
    (8, 4, 4): ((5.25, 2.75), (1.75, 2.75), (0.875, 0.25, 2.75), (2.625, 3.25)),
    (8, 4, 8): ((2.625, 1.875), (0.875, 1.875), (0.4375, 0, 1.875), (1.3125, 1.875)),
    (16, 16, 4): ((11.25, 4.75), None, None, None),
    (8, 8, 1): (None, None, (3.5, 3.5, 8), None),
    (4, 2, 2): (None, None, (1.25, 1, 2), None),
}


def facts(schedule: Schedule) -> tuple[float, float, float]:
    """Idle time of the makespan and of the worst window, and peak memory, where F = B = W = 1."""
    costs = Costs.uniform(schedule.placement)
    timeline, work = simulate(schedule, costs), 3 * schedule.num_microbatches
    found = (timeline.makespan - work, max(timeline.windows) - work, max(peak(schedule, costs)))
    return tuple(round(each, 6) for each in found)


def orders(schedule: Schedule) -> list[str]:
    return [' '.join(map(str, order)) for order in schedule.passes]


@pytest.mark.parametrize('sizes', TABLE, ids=str)
def test_numbers_of_the_table(sizes):
    p, m, n = sizes
    for name, expected in zip(BY_NAME, TABLE[sizes], strict=True):
        if expected is not None:
            made = build(name, p, m, num_slices=n)
            check(made)
            makespan, window, held = facts(made)
            found = (makespan, window, held) if len(expected) == 3 else (makespan, held)
            assert found == pytest.approx(expected, abs=1e-6), name


def test_orders_as_published():
    """Of p = m = n = 2; passes of slice 0 have no dot."""
    assert orders(build('seq1f1b', 2, 2, num_slices=2)) == [
        '0F0 0F0.1 0F1 0BW0.1 0F1.1 0BW0 0BW1.1 0BW1',
        '1F0 1F0.1 1BW0.1 1F1 1BW0 1F1.1 1BW1.1 1BW1',
    ]
    assert orders(build('seq1f1b-zb', 2, 2, num_slices=2)) == [
        '0F0 0F0.1 0F1 0B0.1 0W0.1 0F1.1 0B0 0W0 0B1.1 0W1.1 0B1 0W1',
        '1F0 1F0.1 1B0.1 1F1 1B0 1W0.1 1F1.1 1B1.1 1W0 1B1 1W1.1 1W1',
    ]
    assert orders(build('seq1f1b-interleaved', 2, 2, num_slices=2)) == [
        '0F0 0F0.1 2F0 2F0.1 0F1 0F1.1 2BW0.1 2F1 2BW0 2F1.1 0BW0.1 0BW0 2BW1.1 2BW1 0BW1.1 0BW1',
        '1F0 1F0.1 3F0 3F0.1 3BW0.1 1F1 3BW0 1F1.1 1BW0.1 3F1 1BW0 3F1.1 3BW1.1 3BW1 1BW1.1 1BW1',
    ]


# those that recompute by their own order cannot be cut
CUT = [name for name in names() if name not in ('merak', 'varuna')]
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7))


@given(st.sampled_from(CUT), SHAPES, st.data())
def test_every_family_runs_in_slices(name, shape, data):
    """It does not deadlock, does each task once, and each stage in the order of units."""
    p, m, n = shape
    family = find(name)
    p = max(p, family.min_ranks)
    chunks = data.draw(st.sampled_from(family.chunks[:3]))
    made = in_slices(name, p, m, n, num_chunks=chunks)
    check(made)
    assert made.graph.num_slices == n
    assert made.num_microbatches == m
    assert made.name == (family.name if n == 1 else f'{family.name} + slices {n}')
    forward = [(i, j) for i in range(m) for j in range(n)]
    backward = [(i, n - 1 - j) for i, j in forward]
    for stage, rank in enumerate(made.placement.only_route):
        for kinds, expected in (((F,), forward), ((B, BW), backward), ((W, BW), backward)):
            own = (p for p in made.passes[rank] if p.stage == stage and p.kind in kinds)
            assert [(p.microbatch, p.slice) for p in own] == expected


@given(st.sampled_from(tuple(BY_NAME)), SHAPES)
def test_their_names_say_the_same(name, shape):
    p, m, n = max(2, shape[0]), *shape[1:]
    named, cut_by_name = build(name, p, m, num_slices=n), in_slices(BY_NAME[name], p, m, n)
    check(named)
    assert named.passes == cut_by_name.passes
    assert in_slices(name, p, m, n) == named


@pytest.mark.parametrize('name', [*names(), *BY_NAME])
def test_one_slice_is_the_whole_sequence(name):
    """Pass by pass, phases and their labels included."""
    plain = BY_NAME.get(name, name)
    for p, m in ((2, 3), (4, 8), (4, 3)):
        made, whole = in_slices(name, p, m, 1), build(plain, p, m)
        assert replace(made, name=whole.name) == whole
        assert made.phases == whole.phases


@pytest.mark.parametrize(
    'name', ['gpipe', '1f1b', 'zb-h1', 'zb-2p', 'interleaved', 'breadth-first']
)
def test_the_least_shift_is_taken(name):
    """With forwards one place later than that, the schedule deadlocks or waits for itself."""
    p, m, n = 4, 4, 4
    made = by_rule(build(name, p, m * n), n)
    ahead = [leading(order) for order in made.passes]
    plain = [leading(order) for order in build(name, p, m * n).passes]
    shift = 0 if name in ('gpipe', 'breadth-first') else n - 1
    assert [after - before for after, before in zip(ahead, plain, strict=True)] == [shift] * p
    if shift:
        with pytest.raises(ValueError, match=r'needs|deadlock'):
            check(cut(build(name, p, m * n), n))


def leading(order) -> int:
    """How many forwards a rank begins with."""
    return next(at for at, p in enumerate(order) if p.kind != F)


@pytest.mark.parametrize(
    'family', [f for f in own_families(True) if f.name in BY_NAME], ids=lambda f: f.name
)
def test_formulas_of_slices(family):
    """Where a formula promises a number, simulation finds it; its text computes its number."""
    promised = 0
    for p, m, n, v in product((2, 3, 4, 8), (1, 3, 8), (1, 2, 3, 5, 8), family.chunks[:3]):
        made = build(family.name, p, m, num_chunks=v, num_slices=n)
        _, window, held = facts(made)
        sizes = Sizes(p, m, v, n=n)
        assert held == pytest.approx(family.memory(sizes), abs=1e-5), sizes
        if least := re.search(r'mn >= (.*)p(.*)\)', family.bubble.text):
            said = m * n >= eval(f'{least[1] or 1} * p {least[2]}')
            assert family.bubble.where(sizes) == said, (family.bubble.text, sizes)
        if family.bubble.where(sizes):
            promised += 1
            assert window == pytest.approx(family.bubble(sizes), abs=1e-5), sizes
    assert promised > 10
    sizes = Sizes(8, 48, family.chunks[:3][-1], 2, 3, 1.5, n=8)
    for formula in (family.bubble, family.memory):
        term = re.split(r' \(F=| \(mn|, n', formula.text)[0]
        term = re.sub(r'(?<=[\dpmnvFBW)])(?=[pmnvFBW(])', '*', term)
        assert eval(term, sizes._asdict()) == pytest.approx(formula(sizes)), formula.text


def test_who_does_not_suit_slices_says_so():
    """Where more than twice an n-th of the bubble is left; and what is better does suit them."""
    why = {
        name: unsuited(in_slices(name, 8, 8, 8), build(name, 8, 8)) for name in names(plain=True)
    }
    assert {name for name, each in why.items() if each} == {
        *('v-half', 'v-min', '1f1b-v', 'hanayo'),
    }
    assert re.match(
        'v-half does not suit slices: .*: take one of these, or zbpp plan', why['v-half']
    )


@pytest.mark.parametrize(
    ('make', 'says'),
    [
        (lambda: in_slices('1f1b', 2, 2, 0), '0 slices: give at least 1'),
        (lambda: moving_whole(), 'po-h moves activations, .* such as 1f1b or po'),
        (
            lambda: build('1f1b', 2, 2, num_slices=2),
            '1f1b cannot have 2 slices: .* whole sequences',
        ),
        (
            lambda: build('seq1f1b', 2, 2, num_slices=0),
            'seq1f1b cannot have 0 slices: .* 1 or more',
        ),
        (lambda: by_rule(two_routes(), 2), 'slices: both has two routes: take a schedule of one'),
    ],
)
def test_what_cannot_be_cut(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def moving_whole() -> Schedule:
    """A family of somebody else's, which knows of no slices."""
    with patch.object(place, 'find', lambda name: replace(find(name), options=())):
        return in_slices('po-h', 2, 2, 2)


def two_routes() -> Schedule:
    placement = Placement((0, 1), 'both', opposite=(1, 0), route=(0, 1))
    return Schedule.of('both', placement, 2, [[], []])


def test_a_limit_leaves_room_for_the_forwards_ahead():
    made = in_slices('zb-1p', 4, 4, 2, memory_limit=2.0)
    check(made, memory_limit=2.0)
    assert max(peak(made, Costs.uniform(made.placement))) == 2.0


def test_they_are_written_and_read():
    made = in_slices('seq-zb-v', 4, 3, 3)
    assert Schedule.from_json(made.to_json()) == made


# ---- The order of units, which `check` demands.


@pytest.mark.parametrize(
    ('rank', 'one', 'other', 'says'),
    [
        (0, '0F0', '0F0.1', '0F0.1 on rank 0 comes before 0F0: .* first slice .slice 0 now, not 1'),
        (0, '0F0.1', '0F1', '0F1 on rank 0 comes before 0F0.1: .* first slice'),
        (0, '0B0.1', '0B0', '0B0 on rank 0 comes before 0B0.1: .* last slice .slice 1 now, not 0'),
        (1, '1B0', '1B1.1', '1B1.1 on rank 1 comes before 1B0: .* last slice'),
        (1, '1W0.1', '1W0', '1W0 on rank 1 comes before 1W0.1: .* weight gradient .* last slice'),
        (1, '1W0', '1W1.1', '1W1.1 on rank 1 comes before 1W0: .* weight gradient .* last slice'),
    ],
)
def test_units_out_of_order_are_refused(rank, one, other, says):
    """Two slices of one microbatch, and the last of one before the first of the next."""
    made = in_slices('zb-h1', 2, 2, 2)
    check(made)
    order = list(made.passes[rank])
    a, b = (order.index(Pass.parse(each)) for each in (one, other))
    order[a], order[b] = order[b], order[a]
    passes = tuple(tuple(order) if r == rank else own for r, own in enumerate(made.passes))
    with pytest.raises(ScheduleError, match=says.replace(' slice .', ' slice first .')):
        check(replace(made, passes=passes))


def test_slices_of_evaluation_are_in_order():
    made = in_slices('zb-v', 2, 2, 2).forward_only()
    check(made)
    order = list(made.passes[0])
    order[0], order[1] = order[1], order[0]
    with pytest.raises(ScheduleError, match=r'0F0\.1 on rank 0 comes before 0F0'):
        check(replace(made, passes=(tuple(order), made.passes[1])))


# ---- The planner.

INSTANCES = [
    (p, m, n, times, limit)
    for p, m, n in ((2, 2, 2), (2, 3, 3), (3, 2, 4), (4, 2, 2), (4, 4, 4))
    for times in ((1, 1, 1), (1, 1.2, 0.8))
    for limit in (None, 1.5)
]


@pytest.mark.parametrize(('p', 'm', 'n', 'times', 'limit'), INSTANCES)
def test_plans_of_slices_are_no_worse_than_named_ones(p, m, n, times, limit):
    """Twenty instances, each on both placements of two chunks; with and without a limit."""
    candidates = [
        (each, Costs.uniform(each, *times, comm=0.05))
        for each in (Placement.loop(p, 2), Placement.v(p))
    ]
    with patch.object(budget, '_STEPS_PER_SECOND', 100):
        found = plan(candidates, m, graph=Slicing(n), memory_limit=limit, seconds=2.0)
    check(found.schedule, memory_limit=limit, costs=found.costs)
    assert found.schedule.graph == Slicing(n)(2 * p)
    assert found.value == pytest.approx(simulate(found.schedule, found.costs).makespan)
    assert found.lower_bound <= found.value + 1e-9
    for name, makespan in of_two_chunks(candidates, m, n, limit):
        assert found.value <= makespan + 1e-9, name
        assert found.best_named[1] <= makespan + 1e-9, name


def test_the_exact_solver_knows_whom_a_backward_waits_for():
    """It proves an optimum that can run, and that is no worse than a named schedule."""
    pytest.importorskip('ortools')
    placement = Placement.loop(2)
    problem = Problem(placement, 4, Costs.uniform(placement), (inf, inf), graph=Slicing(2)(2))
    orders = problem.orders(in_slices('gpipe', 2, 2, 2))
    value, _ = replay_whole(problem, orders)
    answer = solve(problem, orders, lower_bound(problem), value, 5.0, 60.0)
    check(problem.schedule(answer.orders, 'exact'))
    best, _ = replay_whole(problem, answer.orders)
    assert answer.bound == best <= simulate(in_slices('zb-h1', 2, 2, 2), problem.costs).makespan
