"""Where a rank stands while its device is behind its host, and what SIGTERM does to it."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from vocabulary import split_1f1b

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Receive, Send
from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.clock import Record
from megatron_zbpp.runtime.guard.activities import Tracker
from megatron_zbpp.runtime.guard.watchdog import Termination
from megatron_zbpp.schedules import build


class DeviceClock:
    """Marks are numbers in the order of the device's work, which has come to `now`."""

    def __init__(self):
        self.now = 0

    def reached(self, mark):
        return mark <= self.now


@pytest.fixture
def ahead():
    """An executor whose host has issued all passes of rank 1 of 3: marks 2i and 2i + 1 for each."""
    schedule = build('zb-h1', 3, 4)
    passes = schedule.passes[1]
    marks = [(2 * i, 2 * i + 1) for i in range(len(passes))]
    return SimpleNamespace(
        program=lower(schedule)[1],
        channels=SimpleNamespace(ranks=[4, 5, 6], leaving=None),
        moves=SimpleNamespace(waits=None),
        clock=DeviceClock(),
        record=Record(list(passes), marks, []),
        current=passes[-1],
        awaiting=False,
    )


def test_device_waits_for_the_input_of_a_pass(ahead):
    tracker = Tracker(ahead)
    ahead.clock.now = 3  # has ended 1F0 and 1F1; the start of 1B0 comes behind its input
    assert tracker.standing() == {
        'now': 'B stage 1 microbatch 0 (1B0)',
        'waits for': 'gradient of stage 2 microbatch 0 from pipeline rank 2 (global rank 6)',
        'last passes': '1F0 1F1',
    }
    assert not tracker.complete


def test_device_runs_a_pass(ahead):
    tracker = Tracker(ahead)
    ahead.clock.now = 4  # 1B0 has started
    assert tracker.standing() == {
        'now': 'B stage 1 microbatch 0 (1B0)',
        'waits for': 'no message',
        'last passes': '1F0 1F1',
    }


def test_device_moves_while_the_host_is_done(ahead):
    tracker = Tracker(ahead)
    total = len(ahead.record.passes)
    for ended in range(total):
        ahead.clock.now = 2 * ended - 1
        assert not tracker.complete
        assert tracker.position()[:2] == (ended, ahead.record.passes[ended])
    ahead.clock.now = 2 * total - 1
    assert tracker.complete
    assert tracker.standing()['now'] == f'all {total} passes done'


def test_wait_for_a_send_to_leave(ahead):
    send = next(i for i in ahead.program if isinstance(i, Send))
    del ahead.record.passes[3:], ahead.record.marks[3:]
    ahead.clock.now = 99
    ahead.current, ahead.channels.leaving = ahead.record.passes[-1], send
    standing = Tracker(ahead).standing()
    assert standing['now'] == 'right after B stage 1 microbatch 0 (1B0)'
    assert standing['waits for'] == (
        'pipeline rank 2 (global rank 6) to take what F stage 1 microbatch 0 made '
        'for F stage 2 microbatch 0'
    )


def test_slices_are_named(ahead):
    """Of what is waited for, and of what was saved."""
    sliced = build('seq1f1b-zb', 3, 4, num_slices=2)
    ahead.program, order = lower(sliced)[1], sliced.passes[1]
    ahead.record = Record(list(order[:3]), [(0, 0)] * 3, [])
    ahead.current, ahead.awaiting = order[3], True
    standing = Tracker(ahead).standing()
    assert standing['now'] == 'B stage 1 microbatch 0 slice 1 (1B0.1)'
    assert standing['waits for'] == (
        'gradient of stage 2 microbatch 0 slice 1 from pipeline rank 2 (global rank 6)'
    )
    p = Pass('F', 0, 2)
    ahead.awaiting, ahead.moves.waits = False, Send(p, Pass('E', 0, 2), 2, saved=True)
    waits = Tracker(ahead).standing()['waits for']
    assert waits.endswith('to take activations of stage 0 microbatch 2 slice 0')


@pytest.mark.parametrize(
    ('awaits', 'words', 'whom'),
    [
        (
            '6S1',
            "the broadcast of 'hidden' of microbatch 1 by pipeline rank 3 (global rank 7)",
            (7,),
        ),
        (
            '6T1',
            "the other ranks to contribute to the all-gather of 'statistics' of microbatch 1",
            (4, 5, 7),
        ),
    ],
)
def test_wait_for_a_collective(ahead, monkeypatch, awaits, words, whom):
    monkeypatch.setattr(dist, 'get_rank', lambda: 6)
    schedule = split_1f1b(4, 2)
    ahead.program, ahead.channels.ranks = lower(schedule)[2], [4, 5, 6, 7]
    ahead.current, ahead.awaiting = Pass.parse(awaits), True
    ahead.record = Record([], [], [])
    tracker = Tracker(ahead)
    assert tracker.standing()['waits for'] == words
    assert tracker.waits() == whom


def test_sigterm_is_read_by_a_thread_and_kills_children():
    own = signal.getsignal(signal.SIGTERM)
    assert own is signal.SIG_DFL
    termination = Termination()
    try:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.3)  # until it has given its handler back
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not termination.wait(0.2), "a child's signal is not ours"
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.wait(5)
        signal.signal(signal.SIGTERM, lambda *_: None)  # a handler of the program's own
        os.kill(os.getpid(), signal.SIGTERM)
        assert not termination.wait(0.2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    finally:
        termination.remove()
    again = Termination()
    again.remove()
    assert signal.getsignal(signal.SIGTERM) is own
    assert signal.set_wakeup_fd(-1) == -1


def test_what_was_saved_is_waited_for(ahead):
    """A partner that is to take activations, or to send them back."""
    tracker, p = Tracker(ahead), Pass('F', 0, 2)
    ahead.clock.now = 2 * len(ahead.record.passes)
    for waits, words in (
        (Send(p, Pass('E', 0, 2), 2, saved=True), 'to take activations of stage 0 microbatch 2'),
        (Receive(p, Pass('K', 0, 2), 2, saved=True), 'activations of stage 0 microbatch 2 from'),
    ):
        ahead.moves.waits = waits
        assert tracker.position().waits == waits and tracker.waits() == (6,)
        assert words in tracker.standing()['waits for']
