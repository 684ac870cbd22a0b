"""Memory of the host for activations: how much is left, and slabs that are used again.

Slabs are taken as they are needed, and page-locked for a GPU. Bytes of a pass may differ from
microbatch to microbatch, as with experts and sequences of any length. So a slab serves what fits
into it and needs half of it or more; where none does, one that is too small for it, but not for
half of it, makes room for another. Of passes that differ by less than half there are so as many as
ever are on the host at once.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


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
