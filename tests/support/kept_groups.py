"""Process groups of a training that the next training on the same ranks takes.

Making one is a rendezvous of all ranks through a store, and Megatron makes eighteen: for a small
training half of its time. Only gloo's, and only of trainings that ended well: others may have
messages that nobody received.
"""

from __future__ import annotations

import functools
import sys
import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_MOST = 64  # groups of all ranks: beyond, those that the last training did not use go

_world: Any = None
_made: list[tuple[tuple, Any]] = []  # since the last training, in order
_free: dict[tuple, list[Any]] = {}
_new_group = dist.new_group


def install() -> None:
    """From now on this process, and its forks, keep groups, whose messages one thread carries."""
    dist.new_group = distributed_c10d.new_group = _taken
    group, device = distributed_c10d.ProcessGroupGloo, functools.cache(_device)
    made = group.__init__

    def on_one_device(self, store, rank, size, timeout=timedelta(minutes=30)):
        options = group._Options()
        options._devices, options._timeout = [device()], timeout
        made(self, store, rank, size, options)

    group.__init__ = on_one_device


def _device() -> Any:
    return distributed_c10d.ProcessGroupGloo.create_default_device()


def _taken(
    ranks: list[int] | None = None,
    timeout: Any = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    **more: Any,
) -> Any:
    own = backend, pg_options, use_local_synchronization, group_desc
    names = 'backend', 'pg_options', 'use_local_synchronization', 'group_desc'
    given = {**dict(zip(names, own, strict=True)), **more}
    gloo = dist.get_backend() == 'gloo' and backend in (None, 'gloo')
    if not gloo or pg_options is not None or use_local_synchronization or any(more.values()):
        return _new_group(ranks, timeout, **given)
    if not _made:
        _agree()
    key = tuple(ranks or range(dist.get_world_size())), timeout, group_desc
    free = _free.get(key)
    group = free.pop(0) if free else _new_group(ranks, timeout, **given)
    _made.append((key, group))
    return group


def _agree() -> None:
    """Keep nothing if ranks have kept different groups: an error may have been some ranks' only."""
    global _world
    if _world is not dist.group.WORLD:
        _free.clear()
        _world = dist.group.WORLD
    count = zlib.crc32(repr([(key, len(free)) for key, free in _free.items()]).encode())
    both = torch.tensor([count, -count])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    if both.tolist() != [count, -count]:
        drop()


def release() -> None:
    """A training is over: the next one may have its groups, unless it ends with an error."""
    if sys.exc_info()[0] is not None or _world is not dist.group.WORLD:
        forget()
        drop()
        return
    if len(_made) + sum(map(len, _free.values())) > _MOST:
        drop()
    for key, group in _made:
        _free.setdefault(key, []).append(group)
    forget()


def forget() -> None:
    """What was made belongs to who made it."""
    _made.clear()


def kept() -> set[Any]:
    return {group for free in _free.values() for group in free}


def drop() -> None:
    """Destroy what is kept."""
    for group in kept() & {*distributed_c10d._world.pg_map}:
        dist.destroy_process_group(group)
    _free.clear()
