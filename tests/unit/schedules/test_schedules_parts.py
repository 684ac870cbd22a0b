"""What the families are made of: orders, drafts, list scheduling, building blocks; by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import needs

from megatron_zbpp import Costs, Pass, Placement, Schedule, check, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import BW, B, F, Phase, W
from megatron_zbpp.schedules.construct.building_blocks import orders, repeat, tighten, with_weights
from megatron_zbpp.schedules.construct.draft import Draft, list_schedule
from megatron_zbpp.schedules.construct.phases import (
    even_groups,
    first_microbatches,
    phases,
    split_one_forward_one_backward,
)


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
    lanes = [
        [
            [Pass(kind, stage, i) for i in range(m)]
            for kind, stage in data.draw(
                st.permutations(
                    [
                        (kind, stage)
                        for kind in (F, B if split else BW)
                        for stage in placement.stages(rank)
                    ]
                )
            )
        ]
        for rank in range(p)
    ]
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
    stages = range(2 * p)
    block = {(F, stage): 3 * stage for stage in stages}
    block |= {
        (B if split else BW, stage): 6 * p + slack + 3 * (2 * p - 1 - stage) for stage in stages
    }
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
