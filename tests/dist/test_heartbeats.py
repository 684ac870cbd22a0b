"""Ranks have the stores in which they say where they are before the first of them may die."""

import queue
import time
from math import inf

import torch.distributed as dist

from megatron_zbpp.runtime.guard.culprit import Heartbeats, RankStatus, _Question, _StatusStore


def connected(late):
    """Whether a rank has both stores once it has met the others, of whom the last comes late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == size - 1:
        time.sleep(late)  # it keeps the spare
    heartbeats = Heartbeats(rank, size)
    heartbeats.meet()
    have = [board.store is not None for board in heartbeats._boards]
    dist.barrier()
    heartbeats.end()
    return have


def test_ranks_meet(ranks):
    assert ranks(3).run(connected, 0.5) == [[True, True]] * 3


class Leaving:
    """A store whose keeper leaves soon after the first question of who holds it."""

    def __init__(self, store, after):
        self.store, self.after = store, after
        self.until = None

    def __getattr__(self, name):
        if name == 'add':
            self.until = time.monotonic() + self.after
        elif self.until is not None and time.monotonic() > self.until:
            raise RuntimeError('the store is gone')
        return getattr(self.store, name)


def test_what_another_has_found_is_heard_while_one_asks():
    """Who keeps the store may leave amid a question of a rank that lost its neighbour late."""
    store = dist.HashStore()
    first, second = (
        _StatusStore(str(rank), rank, 3, lambda: RankStatus('1F0', (2,)), lambda kept=kept: kept)
        for rank, kept in enumerate((store, Leaving(store, 0.3)))
    )
    question = _Question(RankStatus('1F0', (2,), ending=True), inf, queue.SimpleQueue())
    store.set('said 2', f'0 {RankStatus("2F0").to_json()}')
    first.questions.put(question)
    line = question.lines.get(timeout=5)
    assert line.startswith('culprit: global rank 2, which does not answer')
    second.questions.put(question)
    assert question.lines.get(timeout=5) == ''
    assert second.finding == f'{line} (so says global rank 0)'
    first.questions.put(None)
