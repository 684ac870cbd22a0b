"""Recordings of profilers: Chrome's traces of torch's Kineto, and reports of Nsight Systems.

The latter are sqlite databases, as `nsys export --type sqlite` writes them.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_zbpp.ir.strict_json import is_list, is_object
from megatron_zbpp.partitioning.times.recording import Kernel, Range, Recording, matters

EVENTS = 'traceEvents'
_MICRO = 1e-6  # times of the format are in microseconds
_MOST = 1e18  # of them: a clock that counts from 1970 is at a thousandth of it
_HOST = {'cpu_op', 'user_annotation', 'python_function'}
_KERNEL = 'kernel'
_LAUNCHES = {'cuda_runtime', 'cuda_driver'}
_BACKWARD_OF = 'fwdbwd'  # from an operation to the node of autograd that is its backward
_PIPELINE = 'PIPELINE_MODEL_PARALLEL_GROUP'  # Megatron's description of the process group

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


def read_trace(data: Mapping[str, Any], source: str) -> Recording:
    """Return the recording of a trace."""
    events = data[EVENTS]
    if not is_list(events):
        raise ValueError(f'{source}: {EVENTS} is no list: export the trace again')
    ranges: list[Range] = []
    ends: dict[tuple[str, float], float] = {}  # of operations, by thread and start
    marked: list[tuple[str, float]] = []
    launches: dict[int, float] = {}
    kernels: list[tuple[str, float, float, int]] = []
    for at, event in enumerate(events):
        if not is_object(event):
            raise ValueError(f'{source}: event {at} is no object: export the trace again')
        kind, phase = str(event.get('cat')), event.get('ph')
        thread = str(event.get('tid'))
        if kind == _BACKWARD_OF and phase == 's':
            marked.append((thread, _number(event, 'ts', source, at)))
        elif phase == 'X' and (kind in _HOST or kind == _KERNEL or kind in _LAUNCHES):
            start = _number(event, 'ts', source, at)
            end = start + _number(event, 'dur', source, at)
            name, key = str(event.get('name', '')), _correlation(event)
            if kind == 'cpu_op':
                ends[thread, start] = max(end, ends.get((thread, start), end))
            if kind in _HOST and matters(name):
                ranges.append(Range(name, start * _MICRO, end * _MICRO))
            elif kind == _KERNEL and key is not None:
                kernels.append((name, start * _MICRO, end * _MICRO, key))
            elif kind in _LAUNCHES and key is not None:
                launches[key] = start * _MICRO
    rank, pipeline = _ranks(data.get('distributedInfo'))
    return Recording(
        source,
        tuple(ranges),
        tuple((start * _MICRO, ends.get((tid, start), start) * _MICRO) for tid, start in marked),
        tuple(
            Kernel(name, start, end, launches[key])
            for name, start, end, key in kernels
            if key in launches
        ),
        rank,
        pipeline,
    )


def _number(event: Mapping[str, Any], name: str, source: str, at: int) -> float:
    value = event.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST:
        return float(value)
    said = repr(value)[:40]
    raise ValueError(f'{source}: {name!r} of event {at} is {said}, no time: export the trace again')


def _correlation(event: Mapping[str, Any]) -> int | None:
    own = event.get('args')
    value = own.get('correlation') if is_object(own) else None
    return value if isinstance(value, int) else None


def _ranks(info: object) -> tuple[int | None, tuple[int, ...]]:
    """Return the rank of the process, and the ranks of its pipeline; None and (): unknown."""
    if not is_object(info) or not isinstance(info.get('rank'), int):
        return None, ()
    rank: int = info['rank']
    for group in _groups(info.get('pg_config')):
        ranks = group.get('ranks')
        if group.get('pg_desc') == _PIPELINE and is_list(ranks) and rank in ranks:
            return rank, tuple(each for each in ranks if isinstance(each, int))
    return rank, ()


def _groups(config: object) -> Iterator[dict[str, Any]]:
    yield from (group for group in (config if is_list(config) else ()) if is_object(group))


def read_report(path: Path) -> list[Recording]:
    """Return what a report recorded, a recording for each process, by their ids."""
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
