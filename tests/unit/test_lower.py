"""Lowering: messages in one global order, receives posted early, no deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zbpp.ir import Pass, Placement, Schedule
from megatron_zbpp.planning.lower import DeadlockError, Hand, Receive, Send, lower, prove
from megatron_zbpp.schedules import build

schedules = st.builds(
    build, st.sampled_from(['1f1b', 'zb-h1', 'zb-v']), st.integers(2, 5), st.integers(1, 9)
)


@settings(deadline=None)
@given(schedules, st.integers(0, 3))
def test_every_message_has_both_ends(schedule, lead):
    programs = lower(schedule, lead)
    sends, receives, hands = set(), set(), 0
    for rank, program in enumerate(programs):
        order = [i for i in program if isinstance(i, Pass)]
        assert order == list(schedule.passes[rank])
        for at, i in enumerate(program):
            if isinstance(i, Send):
                sends.add((rank, i.peer, i.consumer))
                # what a pass made is sent before the next pass
                assert i.producer == [x for x in program[:at] if isinstance(x, Pass)][-1]
            elif isinstance(i, Receive):
                receives.add((i.peer, rank, i.consumer))
                assert i.consumer in program[at:]
            hands += isinstance(i, Hand)
    assert sends == receives
    # every F but the last stage's hands on, and every B but the first stage's
    assert len(sends) + hands == 2 * (schedule.num_stages - 1) * schedule.num_microbatches


@settings(deadline=None)
@given(schedules)
def test_receives_are_posted_ahead(schedule):
    """A receive stands before the pass that precedes its consumer, unless the consumer is first."""
    for program in lower(schedule, lead=1):
        passes = [i for i in program if isinstance(i, Pass)]
        for at, i in enumerate(program):
            if isinstance(i, Receive):
                before = sum(isinstance(x, Pass) for x in program[:at])
                assert before <= max(0, passes.index(i.consumer) - 1)


def test_circle_of_ranks_is_a_deadlock():
    f, b = [Pass('F', s, 0) for s in range(2)], [Pass('BW', s, 0) for s in range(2)]
    schedule = Schedule.of('circle', Placement.loop(2), 1, [[b[0], f[0]], [f[1], b[1]]])
    with pytest.raises(DeadlockError, match=r'rank 0 waits at 0BW0.*rank 1 waits at 1F0'):
        lower(schedule)


def test_sends_that_wait_for_each_other_are_a_deadlock():
    """Two ranks that both send first hang where sends rendezvous: `prove` must see it."""
    a, b = Pass('F', 0, 0), Pass('F', 1, 0)
    programs = (
        (a, Send(a, b, 1), Receive(a, 1)),
        (b, Send(b, a, 0), Receive(b, 0)),
    )
    with pytest.raises(DeadlockError):
        prove(programs)


def test_messages_out_of_order_are_refused():
    a, b = Pass('F', 1, 0), Pass('F', 1, 1)
    made = Pass('F', 0, 0)
    programs = (
        (made, Send(made, a, 1), Send(made, b, 1)),
        (Receive(b, 0), Receive(a, 0), a, b),
    )
    with pytest.raises(ValueError, match='rank 0 sends for 1F0 where rank 1 awaits'):
        prove(programs)
