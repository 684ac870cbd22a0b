"""Memory of the host for what left: taken as it is needed, page-locked for a GPU, and used again.

Bytes of a pass may differ from microbatch to microbatch, as with experts and sequences of any
length. So a slab serves what fits into it and needs half of it or more; where none does, one that
is too small for it, but not for half of it, makes room for another. Of passes that differ by less
than half there are so as many as ever are on the host at once.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_zbpp.runtime.activations import host

_SPARED = 0.95  # of what the host has left: other ranks take some meanwhile
_MORE = 1.125  # of a slab that was too small: the next one is not, a little later


class PinningError(RuntimeError):
    """The host has no more memory that can be page-locked."""


class Slabs:
    """Slabs of one copy engine."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # the smallest first
        self._retired: list[torch.Tensor] = []  # too small; copies may still be under way

    @property
    def largest(self) -> int:
        """Bytes of the largest that is free; 0: none is."""
        return self._free[-1].numel() if self._free else 0

    def take(self, nbytes: int, new: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return one of `nbytes` or more.

        Args:
            nbytes: that it must have.
            new: returns one of so many bytes that has not been there.

        Raises:
            PinningError: there is no room on the host.
        """
        at = bisect_left(self._free, nbytes, key=torch.Tensor.numel)
        if at < len(self._free) and self._free[at].numel() <= 2 * nbytes:
            return self._free.pop(at)
        if at and 2 * self._free[at - 1].numel() >= nbytes > 0:
            self._retired.append(self._free.pop(at - 1))
            nbytes = int(_MORE * nbytes)
        return new(nbytes)

    def give(self, slab: torch.Tensor) -> None:
        """Take one back."""
        insort(self._free, slab, key=torch.Tensor.numel)

    def release(self) -> None:
        """Give back to the host what was too small.

        The host waits until nothing is copied there, and a driver may wait for the whole device:
        not amid an iteration.
        """
        self._retired.clear()


def require_room(nbytes: int) -> None:
    """Raise where the host would end a process of this job, which has no error for that.

    Raises:
        PinningError: there is not as much memory, and something to spare.
    """
    left = host.room()
    if left is not None and nbytes > _SPARED * left.nbytes:
        raise PinningError(
            f'{nbytes / 2**20:.1f} MiB more of host memory are not to be had, of {left} left: give '
            'the job more memory, or offload fewer chunks'
        )


def locked(nbytes: int, device: torch.device, streams: Sequence[Any]) -> torch.Tensor:
    """Return page-locked memory of just this size; torch's own allocator rounds it up a lot.

    It has its pages for itself, since none can be locked twice.

    Args:
        nbytes: of it.
        device: that copies into it.
        streams: of these copies, and of those back: the memory is unlocked and freed behind them.

    Raises:
        PinningError: the driver refuses.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    slab = torch.frombuffer(mmap.mmap(-1, nbytes, flags=private), dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    result = int(runtime.cudaHostRegister(slab.data_ptr(), nbytes, 0))
    if result != 0:
        _forget_error(device)
        raise PinningError(
            f'{nbytes / 2**20:.1f} MiB of host memory cannot be page-locked (CUDA error {result}): '
            'raise `ulimit -l`, give the job more memory, or offload fewer chunks'
        )
    weakref.finalize(slab, _unlock, runtime, slab.data_ptr(), streams).atexit = False
    return slab


def _unlock(runtime: Any, address: int, streams: Sequence[Any]) -> None:
    for stream in streams:
        stream.synchronize()
    runtime.cudaHostUnregister(address)


def _forget_error(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):
        torch.ones((), device=device)
