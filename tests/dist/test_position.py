"""Where a rank stands, what ranks agree on, and where they say so."""

import os
import queue
import signal
import time
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from vocabulary import split_1f1b

from megatron_zbpp import Pass, build
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import Receive, Send
from megatron_zbpp.runtime.clock import Record
from megatron_zbpp.runtime.guard.activities import Tracker
from megatron_zbpp.runtime.guard.agreement import DisagreementError, agree, compare, fingerprint
from megatron_zbpp.runtime.guard.culprit import Heartbeats, RankStatus, _Question, _StatusStore
from megatron_zbpp.runtime.guard.watchdog import Termination


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
        transfers=SimpleNamespace(waits=None),
        clock=DeviceClock(),
        record=Record(list(passes), marks, []),
        current=passes[-1],
        awaiting=False,
    )


def test_device_waits_for_the_input_of_a_pass_and_runs_it(ahead):
    tracker = Tracker(ahead)
    gradient = 'gradient of stage 2 microbatch 0 from pipeline rank 2 (global rank 6)'
    # it has ended 1F0 and 1F1; the start of 1B0 comes behind its input; then it has started
    for now, waits in ((3, gradient), (4, 'no message')):
        ahead.clock.now = now
        assert tracker.standing() == {
            'now': 'B stage 1 microbatch 0 (1B0)',
            'waits for': waits,
            'last passes': '1F0 1F1',
        }
        assert not tracker.complete


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
    """Of what is waited for, and of what was saved; the first, too, which has no number."""
    sliced = build('seq1f1b-zb', 3, 4, num_slices=2)
    ahead.program, order = lower(sliced)[1], sliced.passes[1]
    for name, part in (('1B0.1', 1), ('1B0', 0)):
        ahead.current, ahead.awaiting = Pass.parse(name), True
        at = order.index(ahead.current)
        ahead.record = Record(list(order[:at]), [(0, 0)] * at, [])
        standing, where = Tracker(ahead).standing(), f'microbatch 0 slice {part}'
        assert standing['now'] == f'B stage 1 {where} ({name})'
        gradient = f'gradient of stage 2 {where} from pipeline rank 2 (global rank 6)'
        assert standing['waits for'] == gradient
    p = Pass('F', 0, 2)
    ahead.awaiting, ahead.transfers.waits = False, Send(p, Pass('E', 0, 2), 2, saved=True)
    waits = Tracker(ahead).standing()['waits for']
    assert waits.endswith('to take activations of stage 0 microbatch 2 slice 0')


BROADCAST = "the broadcast of 'hidden' of microbatch 1 by pipeline rank 3 (global rank 7)"
GATHER = "the other ranks to contribute to the all-gather of 'statistics' of microbatch 1"


@pytest.mark.parametrize(
    ('awaits', 'words', 'whom'), [('6S1', BROADCAST, (7,)), ('6T1', GATHER, (4, 5, 7))]
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
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    termination = Termination()
    try:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # it has given its handler back
            os.write(writer, b'.')
            time.sleep(30)
            os._exit(0)
        assert os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not termination.wait(0.2), "a child's signal is not ours"
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.wait(60)
        signal.signal(signal.SIGTERM, lambda *_: None)  # a handler of the program's own
        os.kill(os.getpid(), signal.SIGTERM)
        assert not termination.wait(0.2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    finally:
        termination.remove()
    Termination().remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_what_was_saved_is_waited_for(ahead):
    tracker, p = Tracker(ahead), Pass('F', 0, 2)
    ahead.clock.now = 2 * len(ahead.record.passes)
    for waits, words in (
        (Send(p, Pass('E', 0, 2), 2, saved=True), 'to take activations of stage 0 microbatch 2'),
        (Receive(p, Pass('K', 0, 2), 2, saved=True), 'activations of stage 0 microbatch 2 from'),
    ):
        ahead.transfers.waits = waits
        assert tracker.position().waits == waits and tracker.waits() == (6,)
        assert words in tracker.standing()['waits for']


# ---- Settings that differ are found by all ranks, and named with the ranks that have them.


@pytest.mark.on_ranks(4)
def test_every_rank_names_what_differs():
    common = {'schedule': 'zb-v', 'number of microbatches': 8, 'message shape': (16, 1, 32)}
    other = common | {'number of microbatches': 4, 'message shape': (16, 1, 64)}
    with pytest.raises(DisagreementError) as told:
        agree(other if dist.get_rank() == 2 else common, dist.group.WORLD)
    words = (
        'ranks were started with different settings: give all of them the same\n'
        '  number of microbatches: 8 on ranks 0, 1, 3; 4 on rank 2\n'
        '  message shape: (16, 1, 32) on ranks 0, 1, 3; (16, 1, 64) on rank 2'
    )
    assert str(told.value) == words


def test_setting_that_another_release_does_not_know():
    with pytest.raises(DisagreementError, match='new: 1 on rank 0; unknown on rank 1'):
        compare({0: {'same': '2', 'new': '1'}, 1: {'same': '2'}})


def test_schedules_that_differ_in_the_order_of_two_passes():
    one = build('zb-h1', 2, 4)
    first = one.passes[0]
    other = replace(one, passes=((first[1], first[0], *first[2:]), one.passes[1]))
    assert fingerprint(one).startswith('zb-h1 (') and fingerprint(one) != fingerprint(other)


# ---- Ranks have the stores in which they say where they are before the first of them may die.


@pytest.mark.on_ranks(3)
def test_ranks_meet():
    """A rank has both stores once it has met the others, of whom the last comes late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == size - 1:
        time.sleep(0.5)  # it keeps the spare
    heartbeats = Heartbeats(rank, size)
    with mock.patch(f'{Heartbeats.__module__}._PATIENCE', 120):  # this machine may be busy
        heartbeats.meet()
    assert all(board.store is not None for board in heartbeats._boards)
    dist.barrier()
    heartbeats.end()


class Leaving:
    """A store whose keeper leaves some calls after the first question of who holds it."""

    def __init__(self, store, calls):
        self.store, self.left, self.asked = store, calls, False

    def __getattr__(self, name):
        self.asked |= name == 'add'
        self.left -= self.asked
        if self.left < 0:
            raise RuntimeError('the store is gone')
        return getattr(self.store, name)


def test_what_another_has_found_is_heard_while_one_asks():
    """Who keeps the store may leave amid a question of a rank that lost its neighbour late."""
    store = dist.HashStore()
    first, second = (
        _StatusStore(str(rank), rank, 3, lambda: RankStatus('1F0', (2,)), lambda kept=kept: kept)
        for rank, kept in enumerate((store, Leaving(store, 12)))
    )
    question = _Question(RankStatus('1F0', (2,), ending=True), inf, queue.SimpleQueue())
    store.set('said 2', f'0 {RankStatus("2F0").to_json()}')
    first.questions.put(question)
    line = question.lines.get(timeout=60)
    assert line.startswith('culprit: global rank 2, which does not answer')
    second.questions.put(question)
    assert question.lines.get(timeout=60) == ''
    assert second.finding == f'{line} (so says global rank 0)'
    first.questions.put(None)
