"""Traces of torch's profiler (Kineto), in the format of Chrome's tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def read_trace(data: Mapping[str, Any], source: str) -> Recording:
    """Return what a trace recorded.

    Args:
        data: of the file.
        source: its name, for messages.

    Raises:
        ValueError: an event is none, or has no times.
    """
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
