"""Copies of storages to the host and back: on CUDA beside the passes, on a stream of their own.

Memory changes where the compute stream is: it waits for a copy out before it frees, and what comes
back is allocated on it before the copy stream writes there. So the allocator needs no
`record_stream`, after which the time of a free depends on when somebody looks.

What passes save may differ in size from microbatch to microbatch, as tokens of experts do. So the
host's memory is used again for what is about as large, and makes way where it is too small.
"""

from __future__ import annotations

import contextlib
import mmap
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch

from megatron_zbpp.runtime.activations import host

_SPARED = 0.95  # of what the host has left: other ranks take some meanwhile
_ALIGNED = 512  # bytes: as the caching allocator of CUDA has them
_ALIKE = 2  # a slab is for what is at most so many times smaller


class PinningError(RuntimeError):
    """The host has no more memory that can be page-locked."""


class Copies:
    """The copy engine of a device: what is begun on it runs in that order.

    Args:
        device: whose memory is freed; of the CPU, a copy is done when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cuda = device.type == 'cuda'
        self._stream: Any = torch.cuda.Stream(device) if self._on_cuda else None
        self._slabs: dict[int, list[torch.Tensor]] = defaultdict(list)  # by bytes, for reuse

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[torch.Tensor, object]:
        """Begin to copy `storages`, as they are after all that runs by now, into one slab.

        Returns:
            the slab, and what tells when it has been written.

        Raises:
            PinningError: there is no room on the host.
        """
        slab = self._slab(sum(_room(storage) for storage in storages))
        computed = self._mark()
        with self._copying():
            self._wait(computed)
            at = 0
            for storage in storages:
                part = slab[at : at + storage.nbytes()]
                part.copy_(bytes_of(storage, self.device), non_blocking=True)
                at += _room(storage)
            return slab, self._mark()

    def back(self, slab: torch.Tensor, storages: Sequence[torch.UntypedStorage]) -> object:
        """Begin to copy `slab` into `storages`, which are just allocated; it is free behind that.

        Returns:
            what tells when they have been written.
        """
        allocated = self._mark()
        with self._copying():
            self._wait(allocated)
            at = 0
            for storage in storages:
                part = slab[at : at + storage.nbytes()]
                bytes_of(storage, self.device).copy_(part, non_blocking=True)
                at += _room(storage)
            written = self._mark()
        self.free(slab)
        return written

    def free(self, slab: torch.Tensor) -> None:
        """Take back a slab: the next copy out into it comes behind what has been begun by now."""
        self._slabs[slab.numel()].append(slab)

    def wait(self, mark: object) -> None:
        """Let what computes from now on wait for `mark`; never the host."""
        self._wait(mark)

    def seconds_per_byte(self, times: int = 3) -> float | None:
        """Return the time of one way to the host, as measured now; None: nothing has gone there.

        To be called where nothing else is under way: the host waits.

        Args:
            times: both ways, of the largest slab that there is; the median counts.
        """
        size = max((size for size, free in self._slabs.items() if free), default=0)
        if not size:
            return None
        storage = self.allocate(size)
        found = []
        for _ in range(1 + times):  # the first may be slow
            self._settle()
            start = time.perf_counter()
            slab, mark = self.out([storage])
            self.wait(mark)
            self.wait(self.back(slab, [storage]))
            self._settle()
            found.append(time.perf_counter() - start)
        return median(found[1:]) / (2 * size)

    def _settle(self) -> None:
        """Let the host wait until the device has done what was asked so far."""
        if self._on_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory of the device, there for what computes from now on."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def _slab(self, nbytes: int) -> torch.Tensor:
        """Return the smallest free slab that fits, or a new one for one that is a bit too small.

        So there are never more of about a size than are away at once.
        """
        sizes = sorted(
            size
            for size, free in self._slabs.items()
            if free and size <= _ALIKE * nbytes and nbytes <= _ALIKE * size
        )
        for size in sizes:
            if size >= nbytes:
                return self._slabs[size].pop()
        if sizes:
            self._slabs[sizes[-1]].pop()  # which frees it
        return self._new(nbytes)

    def _new(self, nbytes: int) -> torch.Tensor:
        """Return a slab that has not been there."""
        _require_room(nbytes)
        if self._on_cuda and nbytes:
            return _locked(nbytes, self.device, self._stream)
        return torch.empty(nbytes, dtype=torch.uint8)

    def _mark(self) -> object:
        return torch.cuda.current_stream(self.device).record_event() if self._on_cuda else None

    def _wait(self, mark: Any) -> None:
        if self._on_cuda:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def _copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._on_cuda else contextlib.nullcontext()


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


def _locked(nbytes: int, device: torch.device, stream: Any) -> torch.Tensor:
    """Return page-locked memory of just this size; torch's own allocator rounds it up a lot.

    It has its pages for itself, since none can be locked twice.

    Args:
        nbytes: of it.
        device: that copies into it.
        stream: of these copies: the memory is unlocked and freed behind them.

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
    weakref.finalize(slab, _unlock, runtime, slab.data_ptr(), stream).atexit = False
    return slab


def _unlock(runtime: Any, address: int, stream: Any) -> None:
    stream.synchronize()
    runtime.cudaHostUnregister(address)


def _forget_error(device: torch.device) -> None:
    """Take what CUDA has kept of an error, which it tells whoever starts a kernel next."""
    with contextlib.suppress(RuntimeError):
        torch.ones((), device=device)


def _room(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // _ALIGNED) * _ALIGNED


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return the storage as a row of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]
