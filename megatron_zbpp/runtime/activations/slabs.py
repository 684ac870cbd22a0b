"""Memory of the host for what left: taken as it is needed, page-locked for a GPU, and used again.

Bytes of a pass may differ from microbatch to microbatch, as with experts and sequences of any
length. So a slab serves what fits into it and needs half of it or more; where none does, one that
is too small for it, but not for half of it, makes room for another. Of passes that differ by less
than half there are so as many as ever are on the host at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import torch

from megatron_zbpp.runtime.activations import host

_SPARED = 0.95  # of what the host has left: other ranks take some meanwhile
_MORE = 1.125  # of a slab that was too small: the next one is not, a little later


class PinningError(RuntimeError):
    """The host has no more memory that can be page-locked."""


class Slabs:
    """Those of one device.

    Args:
        pinned: whether they are page-locked.

    Attributes:
        retired: those that were too small, of which copies may still be under way.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []  # the smallest first
        self.retired: list[torch.Tensor] = []

    @property
    def largest(self) -> int:
        """Bytes of the largest that is free; 0: none is."""
        return self._free[-1].numel() if self._free else 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return one of `nbytes` or more.

        Raises:
            PinningError: there is no room on the host.
        """
        at = bisect_left(self._free, nbytes, key=torch.Tensor.numel)
        if at < len(self._free) and self._free[at].numel() <= 2 * nbytes:
            return self._free.pop(at)
        if at and 2 * self._free[at - 1].numel() >= nbytes > 0:
            self.retired.append(self._free.pop(at - 1))
            nbytes = int(_MORE * nbytes)
        _require_room(nbytes)
        slab = torch.empty(nbytes, dtype=torch.uint8)
        if self._pinned and nbytes:
            _pin(slab)
        return slab

    def give(self, slab: torch.Tensor) -> None:
        """Take one back."""
        insort(self._free, slab, key=torch.Tensor.numel)

    def release(self) -> None:
        """Give memory that was too small back to the host, once nothing is copied any more.

        A driver may wait for the whole device here: not amid an iteration.
        """
        while self.retired:
            slab = self.retired.pop()
            if self._pinned:
                runtime: Any = torch.cuda.cudart()
                runtime.cudaHostUnregister(slab.data_ptr())


def _require_room(nbytes: int) -> None:
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


def _pin(slab: torch.Tensor) -> None:
    """Page-lock memory of just this size; torch's own allocator would round it to a power of two.

    Raises:
        PinningError: the driver refuses.
    """
    runtime: Any = torch.cuda.cudart()
    result = runtime.cudaHostRegister(slab.data_ptr(), slab.numel(), 0)
    if int(result) != 0:
        raise PinningError(
            f'{slab.numel() / 2**20:.1f} MiB of host memory cannot be page-locked (CUDA error '
            f'{int(result)}): raise `ulimit -l`, give the job more memory, or offload fewer chunks'
        )
