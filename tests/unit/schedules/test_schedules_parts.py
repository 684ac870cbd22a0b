"""What the families are made of: orders, drafts, list scheduling, building blocks; by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import needs

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW, B, F, Pass, Placement, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules.construct.building_blocks import (
    orders,
    repeat,
    tighten,
    with_weights,
    without_weights,
)
from megatron_zbpp.schedules.construct.draft import Draft
from megatron_zbpp.schedules.construct.list_scheduling import dispatch
from megatron_zbpp.schedules.construct.orders import (
    chunk_by_chunk,
    defer_weights,
    even_groups,
    one_forward_one_backward,
)


def passes(text: str) -> list[Pass]:
    return [Pass.parse(word) for word in text.split()]


@pytest.mark.parametrize(
    ('warmup', 'order'),
    [
        (0, '0F0 0B0 0F1 0B1 0F2 0B2'),
        (1, '0F0 0F1 0B0 0F2 0B1 0B2'),
        (9, '0F0 0F1 0F2 0B0 0B1 0B2'),
    ],
)
def test_one_forward_one_backward(warmup, order):
    forwards, backwards = passes('0F0 0F1 0F2'), passes('0B0 0B1 0B2')
    assert list(one_forward_one_backward(forwards, backwards, warmup)) == passes(order)


@pytest.mark.parametrize(
    ('defer', 'order'),
    [
        (0, '0F0 1B0 1W0 0B0 0W0'),
        (1, '0F0 1B0 0B0 1W0 0W0'),
        (5, '0F0 1B0 0B0 1W0 0W0'),
    ],
)
def test_defer_weights(defer, order):
    assert list(defer_weights(passes('0F0 1B0 0B0'), defer)) == passes(order)


@given(st.integers(1, 200), st.integers(1, 20))
def test_even_groups(m, size):
    sizes = even_groups(m, size)
    assert sum(sizes) == m
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert min(sizes) >= min(m, size)
    assert len(sizes) == max(1, m // size)


def test_chunk_by_chunk():
    assert chunk_by_chunk(F, (1, 3), [2, 1]) == passes('1F0 1F1 3F0 3F1 1F2 3F2')
    assert chunk_by_chunk(B, (1, 3), [2], first=4) == passes('3B4 3B5 1B4 1B5')


def test_a_draft_keeps_the_time():
    """Two ranks, F 1, B 2, W 0.5, latency 0.25, and B gives back three quarters."""
    costs = Costs((1, 1), (2, 2), (0.5, 0.5), comm=0.25, activation=(1, 1), retained=(0.25, 0.25))
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
def test_dispatch_takes_any_preference(p, m, v, data):
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
    draft = dispatch(placement, m, lanes, limit)
    schedule = draft.schedule('any')
    costs = Costs.uniform(placement, *([v] * 3))  # so that F, B and W of a stage take 1
    check(schedule, memory_limit=limit, costs=costs)
    assert simulate(schedule, costs).makespan == pytest.approx(draft.makespan)


def test_dispatch_puts_weights_in_gaps():
    lanes = [[passes('0F0 0F1 0B0 0B1')], [passes('1F0 1B0 1F1 1B1')]]
    draft = dispatch(Placement.loop(2), 2, lanes)
    assert draft.orders[0] == passes('0F0 0F1 0B0 0W0 0B1 0W1')
    assert draft.orders[1] == passes('1F0 1B0 1F1 1B1 1W0 1W1')


def test_dispatch_refuses_a_limit_that_stops_it():
    lanes = [[passes('0F0 0F1 0B0 0B1')]]
    with pytest.raises(ValueError, match=r'memory_limit 1\.5 is too small'):
        dispatch(Placement.loop(1), 2, lanes, memory_limit=1.5)


def test_repeat_and_orders():
    placement = Placement.loop(2)
    slots = repeat({(F, 0): 0, (F, 1): 1, (BW, 1): 2, (BW, 0): 4}, interval=3, num_microbatches=2)
    assert slots[Pass(BW, 0, 1)] == 7
    assert orders(slots, placement) == [passes('0F0 0F1 0BW0 0BW1'), passes('1F0 1BW0 1F1 1BW1')]


def test_weights_take_the_first_free_slot():
    slots = {Pass(F, 0, 0): 0, Pass(B, 0, 0): 1, Pass(F, 0, 1): 2, Pass(B, 0, 1): 4}
    full = with_weights(slots, Placement.loop(1))
    assert (full[Pass(W, 0, 0)], full[Pass(W, 0, 1)]) == (3, 5)
    assert without_weights(full) == slots


@pytest.mark.parametrize(
    ('limit', 'moved'), [(1, '0F0 0 0BW0 3 0F1 5 0BW1 6'), (2, '0F0 0 0BW0 3 0F1 1 0BW1 5')]
)
def test_a_forward_moves_up_within_the_limit(limit, moved):
    """Until slot 5 the first microbatch is held: a second one before makes two."""
    slots = {Pass(F, 0, 0): 0, Pass(BW, 0, 0): 3, Pass(F, 0, 1): 6, Pass(BW, 0, 1): 8}
    words = moved.split()
    expected = {Pass.parse(p): int(slot) for p, slot in zip(words[::2], words[1::2], strict=True)}
    assert tighten(slots, Placement.loop(1), limit, start=4) == expected


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
