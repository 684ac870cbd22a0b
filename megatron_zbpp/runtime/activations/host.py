"""Host memory that is left for this process: the machine's, and that of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Room(NamedTuple):
    """Memory that can still be taken.

    Attributes:
        nbytes: of it.
        file: that says so.
    """

    nbytes: int
    file: Path

    def __str__(self) -> str:
        return f'{self.nbytes / 2**30:.3g} GiB ({self.file})'


def room(root: Path = Path('/')) -> Room | None:
    """Return the least of what the machine and each control group of this process have left.

    Page cache counts as free: it is given back where memory is short.

    Args:
        root: of the file system.

    Returns:
        None where nothing tells: not on Linux.
    """
    return min((*_of_machine(root), *_of_groups(root)), default=None)


def _of_machine(root: Path) -> Iterator[Room]:
    file = root / 'proc/meminfo'
    value = _values(file, ':').get('MemAvailable')
    if value is not None:
        yield Room(value * 1024, file)


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
