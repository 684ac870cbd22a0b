"""Copies of storages away and back: to the host, or to the memory of another rank.

`Copies` copies to the host and back, on CUDA beside the passes, on streams of their own. Each
direction has one, so that both ways of the link are used at once. Memory of the device changes
where the compute stream is: it waits for a copy out before it frees, and what comes back is
allocated on it before the copy stream writes there. So the allocator needs no `record_stream`,
after which the time of a free depends on when somebody looks. Memory of the host is used again
behind the copy that has read it.

`Partner` and `Keeping` are the two sides of BPipe's pairs: the one sends storages where it would
copy them to the host, the other keeps the bytes and sends them back. How many bytes each storage
has, which may differ from microbatch to microbatch, goes ahead from host to host; the storages of a
pass then travel by one call. Both sides do so at the places that lowering has given them, in one
order of all ranks: no wait here is for something that comes later.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from megatron_zbpp.runtime.activations.host_memory import Slabs, locked, require_room
from megatron_zbpp.runtime.channels import Channels, Transfer
from megatron_zbpp.runtime.stage import Key

_ALIGNED = 512  # bytes: as the caching allocator of CUDA has them
_MEASURED = 3  # copies both ways


class Engine:
    """Moves storages of a device away and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # whose memory is freed

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Any, Any]:
        """Begin to move storages away; return the copy, and a mark of its end.

        PinningError: the host has no room for them.
        """
        raise NotImplementedError

    def back(self, left: Any, storages: Sequence[torch.UntypedStorage], /) -> Any:
        """Begin to bring a copy back into storages; return a mark of the end."""
        raise NotImplementedError

    def wait(self, mark: Any) -> None:
        """Let later passes wait for `mark`."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory of the device, there for what computes from now on."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def free(self, left: Any, /) -> None:
        """Forget a copy."""


class Copies(Engine):
    """The copy engines of a device: copies in one direction run in the order of their begin.

    Of the CPU, a copy is done when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._on_cuda = device.type == 'cuda'
        self._outward: Any = torch.cuda.Stream(device) if self._on_cuda else None
        self._inward: Any = torch.cuda.Stream(device) if self._on_cuda else None
        self._written: dict[int, object] = {}  # by address of a slab, its latest copy out
        self._read: dict[int, object] = {}  # its latest copy back
        self._slabs = Slabs()

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[torch.Tensor, object]:
        """Begin to copy storages, as they are after all that runs by now, into one slab."""
        slab = self._slabs.take(sum(map(_room, storages)), self._new)
        written = self._written[slab.data_ptr()] = self._begin_copy(
            True, self._read.pop(slab.data_ptr(), None), slab, storages
        )
        return slab, written

    def back(self, slab: torch.Tensor, storages: Sequence[torch.UntypedStorage]) -> object:
        """Begin to copy `slab` into `storages`, just allocated; the slab is free behind that."""
        read = self._read[slab.data_ptr()] = self._begin_copy(
            False, self._written.pop(slab.data_ptr(), None), slab, storages
        )
        self.free(slab)
        return read

    def _begin_copy(
        self, outward: bool, before: object, slab: torch.Tensor, storages: Sequence[Any]
    ) -> object:
        """Begin a copy behind all that runs by now, and behind `before`; return its mark."""
        begun, stream = self._mark(), self._outward if outward else self._inward
        with torch.cuda.stream(stream) if self._on_cuda else contextlib.nullcontext():
            self.wait(begun)
            self.wait(before)
            at = 0
            for storage in storages:
                there = slab[at : at + storage.nbytes()]
                here = bytes_of(storage, self.device)
                target, source = (there, here) if outward else (here, there)
                target.copy_(source, non_blocking=True)
                at += _room(storage)
            return self._mark()

    def free(self, slab: torch.Tensor) -> None:
        """Take back a slab: the next copy into it comes behind earlier copies from it."""
        self._slabs.give(slab)

    def finish(self) -> None:
        """Give memory of the host back that is of no use any more; the host waits where it does."""
        self._slabs.release()

    def wait(self, mark: Any) -> None:
        """Let later passes wait for `mark`; never the host."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def seconds_per_byte(self) -> float | None:
        """Return the time of one way to the host, as measured now; None: nothing has gone there.

        It is the median of a few copies of the largest slab that there is, both ways. To be called
        where nothing else is under way: the host waits.
        """
        size = self._slabs.largest
        if not size:
            return None
        storage = self.allocate(size)
        found = []
        for _ in range(1 + _MEASURED):  # the first may be slow
            self._settle()
            start = time.perf_counter()
            slab, mark = self.out([storage])
            self.wait(mark)
            self.wait(self.back(slab, [storage]))
            self._settle()
            found.append(time.perf_counter() - start)
        return median(found[1:]) / (2 * size)

    def _settle(self) -> None:
        if self._on_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def _new(self, nbytes: int) -> torch.Tensor:
        """Return memory of the host that has not been there."""
        require_room(nbytes)
        if self._on_cuda and nbytes:
            return locked(nbytes, self.device, (self._outward, self._inward))
        return torch.empty(nbytes, dtype=torch.uint8)

    def _mark(self) -> object:
        return torch.cuda.current_stream(self.device).record_event() if self._on_cuda else None


def _room(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // _ALIGNED) * _ALIGNED


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return the storage as a row of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]


class Partner(Engine):
    """The partner that the bundles of this rank go to: it sends them back, or forgets them, too."""

    def __init__(self, device: torch.device, channels: Channels, peer: int) -> None:
        super().__init__(device)
        self._channels = channels
        self._peer = peer

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[object, Transfer]:
        """Begin to send `storages`; return what tells when they have left."""
        self._channels.tell_sizes([storage.nbytes() for storage in storages], self._peer)
        leaving = [bytes_of(storage, self.device) for storage in storages]
        return self._peer, self._channels.begin(leaving, self._peer)

    def back(self, left: object, storages: Sequence[torch.UntypedStorage]) -> Transfer:
        """Post receives into `storages`; return what tells when they have come."""
        arriving = [bytes_of(storage, self.device) for storage in storages]
        return self._channels.into(arriving, self._peer)

    def wait(self, mark: Transfer) -> None:
        mark.wait()


@dataclass(eq=False)
class _Kept:
    """The tensors that this rank keeps for a pass of its partner's."""

    peer: int  # whose they are
    tensors: list[torch.Tensor]  # what comes
    arriving: Transfer  # its receive


class Keeping:
    """The activations that a rank keeps for its partner."""

    def __init__(self, device: torch.device, channels: Channels) -> None:
        self._device = device
        self._channels = channels
        self._kept: dict[Key, _Kept] = {}
        self._leaving: deque[Transfer] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, peer: int) -> None:
        """Post the receives of a bundle once the host of `peer` has told how much comes.

        Memory of what was sent back is free before more is taken.
        """
        sizes = self._channels.ask_sizes(peer)
        self.finish()
        tensors = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in sizes]
        self._kept[key] = _Kept(peer, tensors, self._channels.into(tensors, peer))

    def give_back(self, key: Key) -> None:
        """Begin to send a bundle back."""
        kept = self._kept.pop(key)
        kept.arriving.wait()
        self._leaving.append(self._channels.begin(kept.tensors, kept.peer))

    def finish(self) -> None:
        """Wait until all that was sent back has left."""
        while self._leaving:
            self._leaving.popleft().wait()

    def drop(self) -> None:
        """Forget all that is kept, once it has come: forwards that were run ahead for nothing."""
        for kept in self._kept.values():
            kept.arriving.wait()
        self.clear()

    def clear(self) -> None:
        """Forget everything, without a wait."""
        self._kept.clear()
        self._leaving.clear()
