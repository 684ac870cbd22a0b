"""Ranks have the stores in which they say where they are before the first of them may die."""

from __future__ import annotations

import time

import torch.distributed as dist

from megatron_zbpp.runtime.guard.heartbeats import Heartbeats


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
