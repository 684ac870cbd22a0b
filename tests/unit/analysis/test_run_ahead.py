"""What may run ahead: closed under what it needs, and never mixed up on the way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zbpp.analysis.deadlock import prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Receive, Send
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, rank_order, split
from megatron_zbpp.ir import F, Pass, Placement, Schedule
from megatron_zbpp.schedules import FAMILIES, build


@st.composite
def schedules(draw):
    name = draw(st.sampled_from([family.name for family in FAMILIES]))
    p, m = draw(st.integers(2, 5)), draw(st.integers(1, 12))
    try:
        return build(name, p, m)
    except ValueError:
        return build('zb-v', p, m)


@settings(max_examples=60)
@given(schedules(), st.integers(0, 5))
def test_programs_stay_free_of_deadlock_and_in_order(schedule, early):
    """However many ranks go ahead, under every rule of a backend."""
    programs = lower(schedule)
    ahead = passes_run_ahead(schedule, passes_ahead(schedule), early)
    parts = [split(program, ahead) for program in programs]
    prove([begun + rest for begun, rest in parts])
    for program, (begun, rest) in zip(programs, parts, strict=True):
        assert sorted(map(str, program)) == sorted(map(str, begun + rest))


def test_what_a_rank_hands_to_itself_may_run_ahead():
    """Two stages that follow each other on the first rank: both forwards of each microbatch."""
    orders = [
        [Pass(kind, stage, i) for i in range(2) for kind in own for stage in stages]
        for own, stages in ((F, (0, 1)), (F, (2, 3)))
    ]
    orders[0] += [Pass('BW', stage, i) for i in range(2) for stage in (1, 0)]
    orders[1] += [Pass('BW', stage, i) for i in range(2) for stage in (3, 2)]
    schedule = Schedule.of('own', Placement((0, 0, 1, 1)), 2, orders)
    assert passes_ahead(schedule) == (4, 0)


@settings(max_examples=60)
@given(schedules())
def test_what_is_ahead_needs_nothing_from_behind(schedule):
    order = rank_order(schedule.placement)
    counts, rank_of = passes_ahead(schedule), schedule.placement.only_route
    ahead = passes_run_ahead(schedule, counts, len(order))
    assert counts[order[-1]] == 0
    for p in ahead:
        assert p.kind == F
        if p.stage:
            assert Pass(F, p.stage - 1, p.microbatch) in ahead
            sender, taker = rank_of[p.stage - 1], rank_of[p.stage]
            assert order.index(sender) <= order.index(taker)


@settings(max_examples=60)
@given(schedules(), st.integers(0, 5))
def test_all_that_is_sent_ahead_is_received_ahead(schedule, early):
    """So that nothing of a dropped forward is left between two ranks."""
    programs = lower(schedule)
    ahead = passes_run_ahead(schedule, passes_ahead(schedule), early)
    begun = [split(program, ahead)[0] for program in programs]
    sent = [i.consumer for part in begun for i in part if isinstance(i, Send)]
    received = [i.consumer for part in begun for i in part if isinstance(i, Receive)]
    assert sorted(sent) == sorted(received)


@pytest.mark.parametrize(
    ('name', 'p', 'counts'),
    [('zb-2p', 4, (7, 5, 3, 0)), ('zb-h1', 4, (4, 3, 2, 0)), ('1f1b', 4, (4, 3, 2, 0))],
)
def test_warm_up_is_ahead(name, p, counts):
    assert passes_ahead(build(name, p, 16)) == counts


def test_chain_follows_the_stages():
    assert rank_order(Placement.loop(3, 2)) == (0, 1, 2)
    assert rank_order(build('zb-v', 3, 4).placement) == (0, 1, 2)
