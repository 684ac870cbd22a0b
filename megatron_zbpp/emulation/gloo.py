"""Gloo where Megatron and Transformer Engine count on what NCCL does."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_DRAIN_S = 5  # seconds for gloo's threads to end before the process ends
_LET_GO = 0.05  # seconds in which one of them does, or is seen running

# of a process group, by the release of torch
_GATHERS = ('allgather_into_tensor_coalesced', 'all_gather_single_coalesced')


def install(alias_sends: bool) -> None:
    """Let gloo stand in for NCCL in this process, and end before it."""
    if alias_sends:
        dist.isend = distributed_c10d.isend = _aliased_isend
    dist.init_process_group = _over_gloo(dist.init_process_group)
    dist.new_group = distributed_c10d.new_group = _over_gloo(dist.new_group)
    dist.all_gather = distributed_c10d.all_gather = _of_any_sizes(dist.all_gather)
    for name in _GATHERS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _by_bytes(getattr(dist.ProcessGroup, name)))
    atexit.register(_drain_threads)


def _aliased_isend(tensor: torch.Tensor, *args, _original=distributed_c10d.isend, **kwargs):
    """Send an alias, which keeps the memory.

    Megatron's interleaved schedule frees what it sends (`deallocate_output_tensor`) before the send
    is waited for. CUDA's allocator keeps such memory for the stream that reads it; gloo's send
    would read freed memory (0.16 and 0.17). The executor of this package needs no alias.
    """
    return _original(tensor.detach(), *args, **kwargs)


def _by_bytes(original: Callable) -> Callable:
    """Gather bytes where types differ, as FP8 weights and their biases do.

    gloo would convert them all to the type of the first.
    """

    @functools.wraps(original)
    def gather(self, outputs, inputs, *args, **kwargs):
        if len({tensor.dtype for tensor in outputs}) > 1:
            outputs, inputs = ([t.view(torch.uint8) for t in part] for part in (outputs, inputs))
        return original(self, outputs, inputs, *args, **kwargs)

    return gather


def _of_any_sizes(original: Callable) -> Callable:
    """Gather tensors of different sizes, as NCCL does and gloo does not."""

    @functools.wraps(original)
    def wrapper(outputs, own, group=None, async_op=False):  # by that name a watchdog leaves it out
        if len({output.numel() for output in outputs}) == 1:
            return original(outputs, own, group, async_op)
        outputs[dist.get_rank(group)].copy_(own)
        works = _Works(
            dist.broadcast(output, group=group, group_src=rank, async_op=True)
            for rank, output in enumerate(outputs)
            if output.numel()
        )
        return works if async_op else works.wait()

    return wrapper


class _Works(tuple[Any, ...]):
    """Collectives that stand for one."""

    def wait(self) -> None:
        """Return when all have ended."""
        for work in self:
            work.wait()


def _over_gloo(original: Callable) -> Callable:
    """Give gloo for 'nccl', --distributed-backend's default and BridgeCommunicator's name."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        args = ['gloo' if a == 'nccl' else a for a in args]
        return original(*args, **{k: 'gloo' if v == 'nccl' else v for k, v in kwargs.items()})

    return call


def _drain_threads() -> None:
    """Wait until gloo's threads have nothing left to do."""
    deadline = time.monotonic() + _DRAIN_S
    time.sleep(_LET_GO)
    while _runs() and time.monotonic() < deadline:
        time.sleep(_LET_GO)


def _runs() -> bool:
    for task in Path('/proc/self/task').glob('*/stat'):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if task.read_text().partition('(')[2].startswith('pt_gloo_runloop) R'):
                return True
    return False
