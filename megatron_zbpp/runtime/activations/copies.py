"""Copies of storages away and back: to the host, or to the memory of another rank.

`Copies` copies to the host and back, on CUDA beside the passes, on streams of their own. Each
direction has one, so that both ways of the link are used at once. Memory of the device changes
where the compute stream is: it waits for a copy out before it frees, and what comes back is
allocated on it before the copy stream writes there. So the allocator needs no `record_stream`,
after which the time of a free depends on when somebody looks. Memory of the host is used again
behind the copy that has read it.

Memory of the host is taken in slabs as they are needed, and page-locked for a GPU. Bytes of a pass
may differ from microbatch to microbatch, as with experts and sequences of any length. So a slab
serves what fits into it and needs half of it or more; where none does, one that is too small for
it, but not for half of it, makes room for another. Of passes that differ by less than half there
are so as many as ever are on the host at once.

`Partner` and `Keeping` are the two sides of BPipe's pairs: the one sends storages where it would
copy them to the host, the other keeps the bytes and sends them back. How many bytes each storage
has, which may differ from microbatch to microbatch, goes ahead from host to host; the storages of a
pass then travel by one call. Both sides do so at the places that lowering has given them, in one
order of all ranks: no wait here is for something that comes later.
"""

from __future__ import annotations

import contextlib
import mmap
import time
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

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
        self._latest: dict[int, object] = {}  # by address of a slab, the mark of its latest copy
        self._slabs = Slabs()

    def out(self, storages: Sequence[torch.UntypedStorage]) -> tuple[torch.Tensor, object]:
        """Begin to copy storages, as they are after all that runs by now, into one slab."""
        slab = self._slabs.take(sum(map(_padded, storages)), self._new)
        return slab, self._begin_copy(True, slab, storages)

    def back(self, slab: torch.Tensor, storages: Sequence[torch.UntypedStorage]) -> object:
        """Begin to copy `slab` into `storages`, just allocated; the slab is free behind that."""
        read = self._begin_copy(False, slab, storages)
        self.free(slab)
        return read

    def _begin_copy(self, outward: bool, slab: torch.Tensor, storages: Sequence[Any]) -> object:
        """Begin a copy behind all that runs by now, and the slab's latest; return its mark."""
        begun, stream = self._mark(), self._outward if outward else self._inward
        with torch.cuda.stream(stream) if self._on_cuda else contextlib.nullcontext():
            self.wait(begun)
            self.wait(self._latest.pop(slab.data_ptr(), None))
            at = 0
            for storage in storages:
                there = slab[at : at + storage.nbytes()]
                here = bytes_of(storage, self.device)
                target, source = (there, here) if outward else (here, there)
                target.copy_(source, non_blocking=True)
                at += _padded(storage)
            mark = self._latest[slab.data_ptr()] = self._mark()
            return mark

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


def _padded(storage: torch.UntypedStorage) -> int:
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
        self.channels = channels  # of nothing else
        self._kept: dict[Key, _Kept] = {}
        self._leaving: deque[Transfer] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, peer: int) -> None:
        """Post the receives of a bundle once the host of `peer` has told how much comes.

        Memory of what was sent back is free before more is taken.
        """
        sizes = self.channels.ask_sizes(peer)
        self.finish()
        tensors = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in sizes]
        self._kept[key] = _Kept(peer, tensors, self.channels.into(tensors, peer))

    def give_back(self, key: Key) -> None:
        """Begin to send a bundle back."""
        kept = self._kept.pop(key)
        kept.arriving.wait()
        self._leaving.append(self.channels.begin(kept.tensors, kept.peer))

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


class Room(NamedTuple):
    """Memory that can still be taken."""

    nbytes: int  # of it
    file: Path  # that says so

    def __str__(self) -> str:
        return f'{self.nbytes / 2**30:.3g} GiB ({self.file})'


def room(root: Path = Path('/')) -> Room | None:
    """Return the least of what the machine and each control group of this process have left.

    Page cache counts as free: it is given back where memory is short. None: not on Linux.
    """
    file = root / 'proc/meminfo'
    free = _values(file, ':').get('MemAvailable')
    machine = [] if free is None else [Room(free * 1024, file)]
    return min((*machine, *_of_groups(root)), default=None)


def _of_groups(root: Path) -> Iterator[Room]:
    groups = root / 'sys/fs/cgroup'
    for line in _lines(root / 'proc/self/cgroup'):
        _, controllers, path = line.split(':', 2)
        if controllers and 'memory' not in controllers.split(','):
            continue
        base = groups / 'memory' if controllers else groups
        prefix, limit, used = ('total_', 'memory.limit_in_bytes', 'memory.usage_in_bytes')
        if not controllers:
            prefix, limit, used = '', 'memory.max', 'memory.current'
        own = base / path.lstrip('/')
        inside = [own, *own.parents]
        for folder in inside[: inside.index(base) + 1]:
            most, taken = (_number(folder / name) for name in (limit, used))
            if most is None or taken is None:
                continue  # no limit, or its files are those of another name space
            cached = _values(folder / 'memory.stat', ' ')
            files = sum(cached.get(f'{prefix}{name}_file', 0) for name in ('active', 'inactive'))
            yield Room(max(0, most - taken + files), folder / limit)


def _number(file: Path) -> int | None:
    """Return the number in a file; None: it has none, such as `max`."""
    (text,) = _lines(file)[:1] or ['']
    return int(text) if text.isdecimal() else None


def _values(file: Path, separator: str) -> dict[str, int]:
    """Return numbers by name: of lines such as `MemAvailable:  10 kB`."""
    pairs = (line.partition(separator) for line in _lines(file))
    words = ((name, rest.split()) for name, _, rest in pairs)
    return {name: int(rest[0]) for name, rest in words if rest and rest[0].isdecimal()}


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; none where it is not there, or not for this user."""
    try:
        return file.read_text(encoding='utf-8').splitlines()
    except OSError:
        return []


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
        """Return a slab of `nbytes` or more; `new` makes one where none that is free fits."""
        at = bisect_left(self._free, nbytes, key=torch.Tensor.numel)
        if at < len(self._free) and self._free[at].numel() <= 2 * nbytes:
            return self._free.pop(at)
        if at and 2 * self._free[at - 1].numel() >= nbytes > 0:
            self._retired.append(self._free.pop(at - 1))
            nbytes = int(_MORE * nbytes)
        return new(nbytes)

    def give(self, slab: torch.Tensor) -> None:
        """Take a slab back."""
        insort(self._free, slab, key=torch.Tensor.numel)

    def release(self) -> None:
        """Give slabs that were too small back to the host.

        The host waits until nothing is copied there, and a driver may wait for the whole device:
        not amid an iteration.
        """
        self._retired.clear()


def require_room(nbytes: int) -> None:
    """Raise PinningError where the host would end a process of this job: without an error."""
    left = room()
    if left is not None and nbytes > _SPARED * left.nbytes:
        raise PinningError(
            f'{nbytes / 2**20:.1f} MiB more of host memory are not to be had, of {left} left: give '
            'the job more memory, or offload fewer chunks'
        )


def locked(nbytes: int, device: torch.device, streams: Sequence[Any]) -> torch.Tensor:
    """Return page-locked memory of just this size; torch's own allocator rounds it up a lot.

    It has its pages for itself, since none can be locked twice. PinningError: the driver refuses.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    slab = torch.frombuffer(mmap.mmap(-1, nbytes, flags=private), dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    result = int(runtime.cudaHostRegister(slab.data_ptr(), nbytes, 0))
    if result != 0:
        with contextlib.suppress(RuntimeError):  # which the next call would raise
            torch.ones((), device=device)
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
