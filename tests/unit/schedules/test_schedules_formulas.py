"""Bubble and peak memory of every family: its formula against simulation, p = 2..16.

The formulas are the registry's, which `zbpp list` and the docs show. Beside them stand facts that
are no formula of one family, and what public generators of others reach, which this library must
reach too.
"""

import math
import re
from itertools import product
from typing import NamedTuple

import pytest
from figures import held, timeline
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import needs
from published import published

from megatron_zbpp import Costs, Pass, Placement, Schedule, build, check, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import BW, B, F, Phase, W
from megatron_zbpp.schedules import Formula, Sizes, own_families
from megatron_zbpp.schedules.construct.building_blocks import orders, repeat, tighten, with_weights
from megatron_zbpp.schedules.construct.draft import Draft, list_schedule
from megatron_zbpp.schedules.construct.phases import (
    even_groups,
    first_microbatches,
    phases,
    split_one_forward_one_backward,
)

RANKS = (2, 3, 4, 5, 6, 7, 8, 9, 16)  # every remainder that a formula knows
TIMES = ((1, 1, 1), (1, 1.2, 0.8), (2, 3, 1), (4, 4, 3))
EVERY = [family for family in own_families(every=True) if not family.asynchronous]
ranks = pytest.mark.parametrize('p', RANKS)


class Facts(NamedTuple):
    """Idle time of the worst window and of the makespan, and peak memory; of one full rank."""

    window: float
    makespan: float
    peak: float


def facts(name: str, p: int, m: int, v: int | None = None, times=(1, 1, 1)) -> Facts:
    schedule, work = build(name, p, m, num_chunks=v), m * sum(times)
    found = timeline(schedule, *times)
    amounts = max(found.windows) - work, found.makespan - work, max(held(schedule))
    return Facts(*(round(amount, 6) for amount in amounts))


def near(amount: float) -> object:
    return pytest.approx(amount, abs=1e-5)


def cases():
    """Yield families with numbers of ranks, of microbatches and of slices."""
    for family in EVERY:
        cut, two_way = 'slices' in family.techniques, family.num_routes > 1
        for p in (2, 4, 6, 8) if two_way else (2, 3, 4, 8) if cut else RANKS:
            some = {1, p - 1, p, 2 * p, 3 * p + 1, 4 * ((p + 1) // 2)}
            m = range(1, 33) if two_way else {1, 3, 8} if cut else some
            n = (1, 3, 8) if family.in_shards else (1, 2, 3, 5, 8) if cut else (1,)
            marks = [pytest.mark.full] * (p == 16)
            yield pytest.param(family, p, m, n, id=f'{family.name}-{p}', marks=marks)


@pytest.mark.parametrize('text', ['', '(p', 'p q', 'at most p (m >)', 'about 3', 'p.m', 'floor'])
def test_a_text_that_is_no_formula_is_named_with_the_cure(text):
    says = re.escape(f'formula {text!r} cannot be computed: write a term of p, m, v, F, B, W, n')
    with pytest.raises(ValueError, match=f'{says}.*, or give its `value`'):
        Formula(text)
    assert Formula(text, lambda sizes: 3.0)(Sizes(2, 4)) == 3.0


@pytest.mark.parametrize(('family', 'p', 'microbatches', 'slices'), cases())
def test_formulas(family, p, microbatches, slices):
    """Wherever a family promises a number, simulation finds just that, or no more."""
    bubbles = peaks = 0
    for v, m, n in product(family.chunks[:3], microbatches, slices):
        schedule = build(family.name, p, m, num_chunks=v, num_slices=n if len(slices) > 1 else None)
        if family.memory.where(Sizes(p, m, v, n=n)):
            peaks += 1
            assert agrees(family.memory, Sizes(p, m, v, n=n), max(held(schedule))), (m, v, n)
        for times in TIMES:
            sizes = Sizes(p, m, v, *times, n)
            if family.bubble.where(sizes):
                bubbles += 1
                found = max(timeline(schedule, *times).windows)
                assert agrees(family.bubble, sizes, found - m * sum(times)), sizes
    assert bubbles and peaks, 'nothing is promised at these sizes'


def agrees(formula: Formula, sizes: Sizes, found: float) -> bool:
    promised = formula(sizes)
    return found <= promised + 1e-5 if formula.at_most else found == near(promised)


@pytest.mark.parametrize('family', EVERY, ids=lambda family: family.name)
def test_a_formula_says_what_it_computes(family):
    """Where it is not computed from its text, too."""
    slices = 8 if 'slices' in family.techniques else 1
    sizes = Sizes(8, 48, family.chunks[:3][-1], 2, 3, 1.5, slices)
    for formula in (family.bubble, family.memory):
        if not set(formula.text.split()) & {'even', 'odd'}:  # these are no single term
            term = re.split(', or|, [gn]', formula.text.removeprefix('about '))[0]
            said = Formula(term.replace('g', 'ceil(p/2)'))
            assert said(sizes) == near(formula(sizes)), formula.text


@ranks
def test_gpipe_and_1f1b_take_the_same_time(p):
    for m in (1, p, 2 * p + 1):
        assert facts('gpipe', p, m)[:2] == facts('1f1b', p, m)[:2] == (3 * (p - 1), 3 * (p - 1))


@ranks
def test_with_the_barrier_zb_h2_and_zb_2p_are_no_better(p):
    assert facts('zb-h2', p, 2 * p).makespan == p - 1
    for m in (2 * p, 2 * p + 1):
        assert facts('zb-1p', p, m).makespan == facts('zb-2p', p, m).makespan == p - 1


@ranks
@pytest.mark.parametrize('v', [1, 2, 3])
def test_loops_with_few_microbatches(p, v):
    """Below p microbatches each chunk but one waits for what is missing."""
    for m in (1, p - 1):
        short = 3 * (p - m) * (v - 1)
        for name in ('interleaved', 'breadth-first'):
            assert facts(name, p, m, v).makespan == near((3 * (p - 1) + short) / v)


@ranks
def test_zb_v_with_few_microbatches(p):
    assert facts('zb-v', p, 2 * p).makespan == (p - 1) / 2
    for m in {1, p - 1, p, p + 1, 3 * p // 2, 2 * p - 2}:
        got = facts('zb-v', p, m)
        assert got.peak == min(p, m)
        if m >= p:
            assert got == ((2 * p - 1 - m) / 2, (p - 1) / 2, p)
        else:
            assert (p - 1) / 2 < got.makespan <= 2 * p - 1.5 - m
    assert facts('zb-v', p, 1).makespan == 2 * p - 2.5


@pytest.mark.parametrize('times', [(1, 1, 0.7), (3, 4, 2), (1, 1.2, 0.8)])
def test_of_the_two_only_v_half_stands_unequal_times(times):
    """The bubble of V-Half stays what it was, V-Min's grows with every microbatch."""
    few, many = (facts('v-half', 8, m, times=times).makespan for m in (32, 64))
    assert many == near(few)
    few, many = (facts('v-min', 8, m, times=times).makespan for m in (32, 64))
    assert many > 1.4 * few
    assert many > facts('1f1b', 8, 64, times=times).makespan


@ranks
def test_dualpipe_v(p):
    assert facts('dualpipe-v', p, 2 * p).makespan == (p - 1) / 2
    assert all(facts('dualpipe-v', p, m).peak <= min(m, p + 0.5) for m in (1, p, 2 * p - 1))


@ranks
@pytest.mark.parametrize('waves', [1, 2, 3])
def test_hanayo(p, waves):
    """At m = p the published share of idle time; beyond, only the memory is promised."""
    got = facts('hanayo', p, p, 2 * waves)
    share = got.makespan / (got.makespan + 3 * p)
    assert share <= (2 * p - 2) / (3 * p * waves + p - 1) + 1e-6
    if waves == 1:
        assert facts('hanayo', p, 2 * p, 2).makespan <= 2 * (p - 1) + 0.5


@pytest.mark.parametrize(
    ('name', 'v', 'others'), published(__file__, 'public generators of others')
)
def test_as_good_as_the_public_generators(name, v, others):
    for (p, m), (window, most) in zip([(4, 8), (8, 16), (8, 32), (16, 32)], others):  # noqa: B905
        got = facts(name, p, m, v)
        assert got.window <= window
        assert got.peak <= most


def test_zb_v_makespan_at_unequal_times():
    """p=8, m=24, 1/1.2/0.8: the same 5.5 % as the best of others."""
    idle = facts('zb-v', 8, 24, times=(1, 1.2, 0.8)).makespan
    assert idle / (idle + 72) == pytest.approx(0.055, abs=5e-4)


# ---- What the families are made of: orders, drafts, list scheduling, building blocks; by hand.


def passes(text: str) -> list[Pass]:
    return [Pass.parse(word) for word in text.split()]


def flat(found: list[Phase]) -> list[Pass]:
    return [p for phase in found for p in phase.passes]


@given(
    chunks=st.integers(1, 3),
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ahead=st.integers(0, 9),
    defer=st.integers(0, 15),
)
def test_no_more_than_so_many_weights_wait(chunks, groups, ahead, defer):
    """Whatever the sizes: each pass once, F before B before W, a W as soon as enough wait."""
    groups = sorted(groups, reverse=True)
    order = flat(split_one_forward_one_backward(range(chunks), groups, ahead, defer))
    m = sum(groups)
    every = {Pass(k, stage, i) for k in (F, B, W) for stage in range(chunks) for i in range(m)}
    assert len(order) == len(every) and set(order) == every
    backwards = [p for p in order if p.kind == B]
    assert [p for p in order if p.kind == W] == [p._replace(kind=W) for p in backwards]
    at = {p: place for place, p in enumerate(order)}
    assert all(at[p._replace(kind=F)] < at[p] < at[p._replace(kind=W)] for p in backwards)
    for number, p in enumerate(backwards[defer:]):
        assert order[at[p] + 1] == backwards[number]._replace(kind=W)


def test_phases():
    """One table for any number of microbatches; no row runs less than never."""
    table = [
        (2, 'F0', 'a'), (-1, 'F1', 'never'), (9, 'F1 F0 B1', 'b'), (2, 'W1 B0', 'c'), (2, 'W0', 'd')
    ]  # fmt: skip
    found = phases([0, 3], 2, table)
    assert [phase.label for phase in found] == ['a', 'b', 'c', 'd']
    assert flat(found) == passes('0F0 0F1 3F0 3B0 3F1 3B1 3W0 0B0 3W1 0B1 0W0 0W1')
    assert flat(first_microbatches(found, 1)) == passes('0F0 3F0 3B0 3W0 0B0 0W0')
    # they tell people what a pass is about; a schedule with others is the same schedule
    table = [(1, 'F', 'up'), (1, 'BW', 'down')]
    schedule = Schedule.of('s', Placement.loop(2), 1, [phases([r], 1, table) for r in range(2)])
    assert schedule.phases == (((0, 'up'), (1, 'down')),) * 2
    plain = Schedule.of('s', Placement.loop(2), 1, schedule.passes)
    assert plain.phases == ((), ())
    assert plain == schedule and hash(plain) == hash(schedule)
    assert plain.to_json() == schedule.to_json()
    assert schedule.reversed().phases == schedule.phases[::-1]
    assert schedule.forward_only().phases == ()


@given(st.integers(1, 200), st.integers(1, 20))
def test_even_groups(m, size):
    sizes = even_groups(m, size)
    assert sum(sizes) == m
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert min(sizes) >= min(m, size)
    assert len(sizes) == max(1, m // size)


def test_a_draft_keeps_the_time():
    """Two ranks, F 1, B 2, W 0.5, latency 0.25, and B gives back three quarters."""
    costs = Costs.of(
        (1, 1), (2, 2), (0.5, 0.5), comm=0.25, activation=(1, 1), retained=(0.25, 0.25)
    )
    draft = Draft(Placement.loop(2), 1, costs)
    assert draft.arrival(Pass(F, 1, 0)) == math.inf
    ends = [draft.put(p) for p in passes('0F0 1F0 1B0')]
    assert ends == [1, 2.25, 4.25]
    assert draft.arrival(Pass(B, 0, 0)) == 4.5
    assert draft.held == [1, 0.25]
    assert draft.has_room(1, 0.75, 1)
    assert not draft.has_room(1, 0.8, 1)
    assert [*draft.pending[1]] == passes('1W0')
    ends = [draft.put(p) for p in passes('1W0 0B0 0W0')]
    assert ends == [4.75, 6.5, 7]
    assert draft.idle == [3.5, 0]
    assert draft.held == [0, 0]
    assert (draft.makespan, draft.window) == (7, 7)


@settings(max_examples=100)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 4), st.data())
def test_list_scheduling_takes_any_preference(p, m, v, data):
    """Whatever ranks prefer, every lane ends, within a limit that holds one microbatch or more."""
    placement = Placement.wave(p, v)
    limit = data.draw(st.floats(1, m + 1))
    split = data.draw(st.booleans())
    lanes = []
    for stages in map(placement.stages, range(p)):
        queues = data.draw(st.permutations([*product((F, B if split else BW), stages)]))
        lanes.append([[Pass(*queue, i) for i in range(m)] for queue in queues])
    draft = list_schedule(placement, m, lanes, limit)
    schedule = draft.schedule('any')
    costs = Costs.uniform(placement, *([v] * 3))  # so that F, B and W of a stage take 1
    check(schedule, memory_limit=limit, costs=costs)
    assert simulate(schedule, costs).makespan == pytest.approx(draft.makespan)


@settings(max_examples=100)
@given(st.integers(2, 5), st.integers(1, 8), st.integers(0, 20), st.booleans(), st.data())
def test_tightened_slots_are_a_schedule(p, m, slack, split, data):
    """Any block without collisions, tightened: nothing later than before, nothing out of turn."""
    placement = Placement.v(p)
    width = 1 if split else 2
    stages, back = range(2 * p), B if split else BW
    block = {(F, stage): 3 * stage for stage in stages}
    block |= {(back, stage): 6 * p + slack + 3 * (2 * p - 1 - stage) for stage in stages}
    slots = repeat(block, interval=24 * p + slack, num_microbatches=m)
    if split:
        slots = with_weights(slots, placement)
    limit = data.draw(st.integers(2, 2 * m + 1))
    start = data.draw(st.integers(0, 20))
    moved = tighten(slots, placement, limit, start=start)
    assert all(moved[q] <= slots[q] for q in slots)
    assert all(moved[q] == slots[q] for q in slots if slots[q] < start)
    for q in slots:
        for before in needs(q, slots):
            assert moved[before] + (width if before.kind == BW else 1) <= moved[q]
    schedule = Schedule.of('tight', placement, m, orders(moved, placement))
    check(schedule)
    assert max(peak(schedule, Costs.uniform(placement))) <= limit / 2
