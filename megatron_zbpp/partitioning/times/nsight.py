"""Reports of Nsight Systems, as `nsys export --type sqlite` writes them."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_zbpp.partitioning.times.recording import Kernel, Range, Recording, matters

MAGIC = b'SQLite format 3\x00'
_NANO = 1e-9  # times of the tables are in nanoseconds
_PUSHED, _STARTED = 59, 60  # event types of ranges
# what emit_nvtx appends to the name of an operation that autograd knows a backward of
_FORWARD = re.compile(r', seq = \d+')
_BACKWARD_NAME = re.compile(r'Backward\w*,|^torch::autograd')
_RANGES = """
SELECT n.globalTid, COALESCE(n.text, s.value), n.start, n.end
FROM NVTX_EVENTS AS n LEFT JOIN StringIds AS s ON s.id = n.textId
WHERE n.end IS NOT NULL AND n.eventType IN (?, ?)
"""
_KERNELS = """
SELECT r.globalTid, s.value, k.start, k.end, r.start
FROM CUPTI_ACTIVITY_KIND_KERNEL AS k
JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS r
  ON r.correlationId = k.correlationId AND (r.globalTid >> 24) = (k.globalPid >> 24)
LEFT JOIN StringIds AS s ON s.id = k.shortName
"""


def read_report(path: Path) -> list[Recording]:
    """Return what a report recorded, a recording for each process, by their ids.

    Raises:
        ValueError: it lacks the tables of ranges or kernels, or is damaged.
    """
    try:
        with closing(sqlite3.connect(f'{path.absolute().as_uri()}?mode=ro', uri=True)) as base:
            return [*_processes(base, str(path))]
    except sqlite3.Error as error:
        raise ValueError(
            f'{path}: {error}: export it by nsys export --type sqlite, of a report that was '
            'recorded with -t nvtx,cuda'
        ) from error


def _processes(base: sqlite3.Connection, source: str) -> Iterator[Recording]:
    tables = {name for (name,) in base.execute('SELECT name FROM sqlite_master')}
    ranges: dict[int, list[Range]] = defaultdict(list)
    operations: dict[int, list[tuple[float, float]]] = defaultdict(list)
    kernels: dict[int, list[Kernel]] = defaultdict(list)
    for thread, text, first, last in base.execute(_RANGES, (_PUSHED, _STARTED)):
        process, name = _process(thread), str(text)
        start, end = _seconds(first), _seconds(last)
        if end < start:
            raise sqlite3.DataError(f'range {name!r} ends before it starts')
        if matters(name):
            ranges[process].append(Range(name, start, end))
        elif _FORWARD.search(name) and not _BACKWARD_NAME.search(name):
            operations[process].append((start, end))
    if 'CUPTI_ACTIVITY_KIND_KERNEL' in tables:
        for thread, text, first, last, launched in base.execute(_KERNELS):
            own = Kernel(str(text), _seconds(first), _seconds(last), _seconds(launched))
            kernels[_process(thread)].append(own)
    for process in sorted(ranges.keys() | operations.keys()):
        yield Recording(
            f'{source}, process {process}' if len(ranges) > 1 else source,
            tuple(ranges[process]),
            tuple(operations[process]),
            tuple(kernels[process]),
        )


def _process(thread: Any) -> int:
    """Return the id of the process that a `globalTid` is of."""
    return int(thread) >> 24 & 0xFFFFFF


def _seconds(nanoseconds: Any) -> float:
    if not isinstance(nanoseconds, int) or nanoseconds < 0:
        raise sqlite3.DataError(f'{nanoseconds!r} is no time in nanoseconds')
    return nanoseconds * _NANO
