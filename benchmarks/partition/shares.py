"""A part of a processor for each rank, by control groups: Linux, as root.

More ranks than processors would take each other's time, and what a pass takes would depend on who
computes beside it. With a share each rank is a slower processor of its own: it never gets more,
and never less.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PERIOD = 10_000  # microseconds in which a rank gets its share
_SECONDS = 10  # until a group must be empty
_MOUNTS = Path('/proc/self/mounts')


@dataclass(frozen=True)
class Controller:
    """Where the kernel takes limits of processors.

    Attributes:
        folder: of the hierarchy.
        version: of control groups, 1 or 2.
    """

    folder: Path
    version: int

    @classmethod
    def found(cls, mounts: str) -> Controller:
        """Return the one that is mounted.

        Args:
            mounts: lines as in /proc/self/mounts.

        Raises:
            OSError: there is none.
        """
        for line in mounts.splitlines():
            _, folder, kind, options, *_ = line.split()
            if kind == 'cgroup' and 'cpu' in options.split(','):
                return cls(Path(folder), 1)
            listed = Path(folder) / 'cgroup.controllers'
            if kind == 'cgroup2' and listed.exists() and 'cpu' in listed.read_text().split():
                return cls(Path(folder), 2)
        raise OSError('shares of processors: no control groups for them are mounted')

    def make(self, name: str, share: float) -> Path:
        """Make a group that has so much of a processor, before others if they want it, too.

        Raises:
            OSError: that is not permitted.
        """
        group, quota = self.folder / name, round(share * _PERIOD)
        if self.version == 2:
            (self.folder / 'cgroup.subtree_control').write_text('+cpu')
        group.mkdir(exist_ok=True)
        if self.version == 1:
            values = {'cfs_period_us': _PERIOD, 'cfs_quota_us': quota, 'shares': 1 << 18}
        else:
            values = {'max': f'{quota} {_PERIOD}', 'weight': 10_000}
        for field, value in values.items():
            (group / f'cpu.{field}').write_text(str(value))
        return group


@dataclass(frozen=True)
class Shares:
    """The groups of all ranks.

    Attributes:
        groups: folder of each.
        processors: the one that each rank computes on.
        version: of control groups.
    """

    groups: tuple[Path, ...]
    processors: tuple[int, ...]
    version: int

    def enter(self, rank: int) -> None:
        """Put this thread there (version 2 of control groups: the whole process).

        All threads of the process stay on the rank's processor.

        Raises:
            OSError: that is not permitted.
        """
        group = self.groups[rank]
        if self.version == 1:
            (group / 'tasks').write_text(str(threading.get_native_id()))
        else:
            (group / 'cgroup.procs').write_text(str(os.getpid()))
        for thread in Path('/proc/self/task').iterdir():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), {self.processors[rank]})


def spread(shares: Sequence[float], processors: Sequence[int]) -> tuple[int, ...]:
    """Return the processor of each rank, neighbours on the same one.

    >>> spread([0.45, 0.45, 0.3, 0.45], [0, 1])
    (0, 0, 1, 1)

    Raises:
        ValueError: those of a processor want more than it has.
    """
    many = min(len(processors), len(shares))
    chosen = tuple(processors[rank * many // len(shares)] for rank in range(len(shares)))
    for each in set(chosen):
        wanted = sum(s for s, own in zip(shares, chosen, strict=True) if own == each)
        if wanted > 1 or min(shares) <= 0:
            ranks = chosen.count(each)
            raise ValueError(
                f'shares of {wanted:.2f} of a processor for {ranks} ranks: give --share above 0 '
                f'and up to {1 / ranks:.2f}'
            )
    return chosen


@contextmanager
def shared(shares: Sequence[float]) -> Iterator[Shares]:
    """Make the groups; inside, ranks may enter them.

    Args:
        shares: of a processor, of each rank.

    Raises:
        OSError: this machine does not let us.
        ValueError: there are too few processors for that.
    """
    if not hasattr(os, 'sched_setaffinity'):
        raise OSError('shares of processors can be had on Linux only: leave --share out')
    processors = spread(shares, sorted(os.sched_getaffinity(0)))
    controller = Controller.found(_MOUNTS.read_text())
    made: list[Path] = []
    try:
        for rank, share in enumerate(shares):
            made.append(controller.folder / f'zbpp{os.getpid()}-{rank}')
            try:
                controller.make(made[-1].name, share)
            except OSError as error:
                raise OSError(f'shares of processors, as root: {error}') from None
        yield Shares(tuple(made), processors, controller.version)
    finally:
        for group in made:
            _remove(group)


def _remove(group: Path) -> None:
    """Remove a group when its last process is gone, which may take a moment."""
    until = time.monotonic() + _SECONDS
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
