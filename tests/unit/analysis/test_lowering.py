"""Lowering: messages in one global order, receives posted in time, no deadlock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import Timing

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import EARLY, LATE, RECEIVES, Hand, Receive, Send
from megatron_zbpp.ir import Pass, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.grid import ScheduleError
from megatron_zbpp.schedules import build

schedules = st.builds(
    build, st.sampled_from(['1f1b', 'zb-h1', 'zb-v']), st.integers(2, 5), st.integers(1, 9)
)
receives = st.sampled_from(RECEIVES)


@given(schedules, receives)
def test_every_message_has_both_ends(schedule, receives):
    programs = lower(schedule, receives)
    sends, receives, hands = set(), set(), 0
    for rank, program in enumerate(programs):
        order = [i for i in program if isinstance(i, Pass)]
        assert order == list(schedule.passes[rank])
        for at, i in enumerate(program):
            if isinstance(i, Send):
                sends.add((rank, i.peer, i.consumer))
                # what a pass made is sent before the next one runs
                assert i.producer == [p for p in program[:at] if isinstance(p, Pass)][-1]
            elif isinstance(i, Receive):
                receives.add((i.peer, rank, i.consumer))
                assert i.consumer in program[at:]
            hands += isinstance(i, Hand)
    assert sends == receives
    # every F but the last stage's hands on, and every B but the first stage's
    assert len(sends) + hands == 2 * (schedule.num_stages - 1) * schedule.num_microbatches


@given(schedules, receives, st.integers(0, 2**32).map(Random))
def test_what_is_not_under_way_has_come(schedule, receives, random):
    """Whichever rank acts next: of each channel all but so many messages have been taken."""
    programs = lower(schedule, receives)
    cursor, arrived, sent = [0] * len(programs), set(), defaultdict(list)
    taken = [set() for _ in programs]
    expected = [{i.consumer for i in program if isinstance(i, Receive)} for program in programs]
    running = set(range(len(programs)))
    while running:
        rank = random.choice(sorted(running))
        i = programs[rank][cursor[rank]]
        if isinstance(i, Pass):
            if i in expected[rank] and i not in arrived:
                continue  # it waits for its message
            taken[rank].add(i)
        elif isinstance(i, Send):
            arrived.add(i.consumer)
            sent[rank, i.peer].append(i.consumer)
            assert taken[i.peer].issuperset(sent[rank, i.peer][: -i.under_way])
        cursor[rank] += 1
        if cursor[rank] == len(programs[rank]):
            running.remove(rank)


def test_few_messages_are_under_way():
    """In 1F1B as many forwards as a rank holds, and a gradient while the next is made."""
    for rank, program in enumerate(lower(build('1f1b', 4, 32))):
        most = defaultdict(int)
        for i in program:
            if isinstance(i, Send):
                most[i.peer - rank] = max(most[i.peer - rank], i.under_way)
        assert most.get(1, 0) <= 4 - rank
        assert most.get(-1, 0) <= 4


TIMES = ((1, 1, 1), (1, 1.3, 0.7), (1, 1.4, 0.9))  # of F, B and W


@pytest.mark.parametrize('times', TIMES)
@pytest.mark.parametrize('receives', [EARLY, LATE])
@pytest.mark.parametrize('name', ['1f1b', 'interleaved', 'zb-h1', 'zb-2p', 'zb-v', 'v-half'])
def test_messages_travel_while_their_receiver_computes(name, receives, times):
    """Where receives begin behind the passes launched before them, and where all begins in order:
    hardly slower than where each message leaves at once, at a tenth of a rank's F a message."""
    schedule = build(name, 8, 32)
    costs = replace(Costs.uniform(schedule.placement, *times), comm=0.1)
    programs = lower(schedule, receives)
    at_once = Timing(programs, costs, streams=False, in_order=False).makespan
    for streams, in_order in ((True, False), (False, True), (True, True)):
        assert Timing(programs, costs, streams, in_order).makespan <= 1.003 * at_once


def test_circle_of_ranks_is_a_deadlock():
    f, b = [Pass('F', s, 0) for s in range(2)], [Pass('BW', s, 0) for s in range(2)]
    schedule = Schedule.of('circle', Placement.loop(2), 1, [[b[0], f[0]], [f[1], b[1]]])
    with pytest.raises(ScheduleError, match=r'rank 0 at 0BW0 waits.*rank 1 at 1F0 waits'):
        lower(schedule)
