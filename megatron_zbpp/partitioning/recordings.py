"""Recordings of profilers, the passes of one process in each, and the times of stages.

Read are Chrome's traces of torch's Kineto, and reports of Nsight Systems: sqlite databases, as
`nsys export --type sqlite` writes them. Passes are found by the first of three that a recording
has: our own ranges (`PP:1F0`); Megatron's `forward_step` and `backward_step` in recorded call
stacks; operations of autograd, of which messages between stages and the change from forward to
backward divide one pass from the next.

>>> recording = Recording('a.json', (Range('PP:0F0', 0.0, 1.0), Range('PP:0B0', 2.0, 4.0)))
>>> [(p.kind, p.stage, p.end - p.start) for p in find_passes(recording)]
[('F', 0, 1.0), ('B', 0, 2.0)]
"""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_zbpp.ir import BW, B, F, Pass, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.strict_json import is_list, is_object

OURS = 'PP:'  # our range around a pass: see runtime.clock
_STEP = re.compile(r'pipeline_parallel[\\/]schedules\.py\(\d+\): (forward|backward)_step')
_STEPS = {'forward': F, 'backward': BW}
_NODE = 'autograd::engine::evaluate_function'
_MODULE = 'megatron.core.'  # Megatron's own ranges, of forwards
_MESSAGES = ('c10d::send', 'c10d::recv', 'nccl:send', 'nccl:recv', 'ncclSend', 'ncclRecv')
_BETWEEN = ''  # the kind of what divides passes


class Range(NamedTuple):
    """A range of the host, in seconds of the process's clock."""

    name: str
    start: float
    end: float


class Kernel(NamedTuple):
    """A kernel of the device, in seconds; `launched` is when the host launched it."""

    name: str
    start: float
    end: float
    launched: float


class TimedPass(NamedTuple):
    """A pass as it ran, in seconds."""

    kind: str  # F, B, W, BW or another of ours
    stage: int | None  # in model order; None: the recording does not tell
    number: int  # which one of its stage and kind this is, from 0 on; see `slice`
    slice: int  # of the sequence; each has numbers of its own
    start: float  # of the first kernel, or of the range where no kernels were recorded
    end: float  # of the last one


@dataclass(frozen=True)
class Recording:
    """Ranges, operations and kernels that a profiler recorded of one process, in any order."""

    source: str  # file that it is from, for messages
    ranges: tuple[Range, ...]  # of the host, those that `matters` names
    # start and end of forward operations that autograd knows a backward of
    operations: tuple[tuple[float, float], ...] = ()
    kernels: tuple[Kernel, ...] = ()  # of the device; empty on a CPU
    rank: int | None = None  # of the process; None: unknown
    pipeline: tuple[int, ...] = ()  # ranks of its pipeline, in their order; empty: unknown


def matters(name: str) -> bool:
    """Return True for a range whose name tells of passes."""
    return name.startswith((OURS, _NODE, _MODULE, *_MESSAGES)) or _STEP.search(name) is not None


def find_passes(recording: Recording) -> list[TimedPass]:
    """Return the passes of a recording, by their starts.

    Where kernels were recorded, a pass lasts from its first kernel to its last; kernels of NCCL do
    not count at either end, and a pass without kernels is left out.
    """
    found = _ours(recording) or _steps(recording) or _runs(recording)
    if recording.kernels:
        found = _on_device(found, recording.kernels)
    count: Counter[tuple[object, ...]] = Counter()
    passes: list[TimedPass] = []
    for own in sorted(found, key=lambda p: (p.start, p.end)):
        key = (own.kind, own.stage, own.slice)
        passes.append(own._replace(number=count[key]))
        count[key] += 1
    return passes


def _ours(recording: Recording) -> list[TimedPass]:
    found: list[TimedPass] = []
    for name, start, end in recording.ranges:
        if name.startswith(OURS):
            try:
                p = Pass.parse(name.removeprefix(OURS))
            except ValueError:
                continue  # a range of somebody else's
            found.append(TimedPass(p.kind, p.stage, p.microbatch, p.slice, start, end))
    return found


def _steps(recording: Recording) -> list[TimedPass]:
    return [
        TimedPass(_STEPS[step[1]], None, 0, 0, start, end)
        for name, start, end in recording.ranges
        if (step := _STEP.search(name)) and name.endswith('_step')
    ]


def _runs(recording: Recording) -> list[TimedPass]:
    """Return the passes that operations of autograd tell."""
    nodes = _outermost((r.start, r.end) for r in recording.ranges if r.name.startswith(_NODE))
    modules = [(r.start, r.end) for r in recording.ranges if r.name.startswith(_MODULE)]
    forwards = _outermost([*recording.operations, *modules], outside=nodes)
    inside = _outermost([*nodes, *forwards])
    messages = _outermost(
        ((r.start, r.end) for r in recording.ranges if r.name.startswith(_MESSAGES)), outside=inside
    )
    kinds = ((F, forwards), (BW, nodes), (_BETWEEN, messages))
    marks = sorted((*own, kind) for kind, intervals in kinds for own in intervals)
    found: list[TimedPass] = []
    last, length = _BETWEEN, 0
    for start, end, kind in marks:
        if kind == last != _BETWEEN:
            length += 1
            found[-1] = found[-1]._replace(end=max(end, found[-1].end))
        elif kind == BW and last == F and length == 1:  # the loss is scaled after a message
            found[-1] = found[-1]._replace(kind=BW, end=end)
        elif kind != _BETWEEN:
            length = 1
            found.append(TimedPass(kind, None, 0, 0, start, end))
        last = kind
    return found


def _outermost(
    intervals: Iterable[tuple[float, float]], outside: Sequence[tuple[float, float]] = ()
) -> list[tuple[float, float]]:
    """Return the intervals that lie within no other, nor start within one of `outside`."""
    starts = [start for start, _ in outside]
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals, key=lambda own: (own[0], -own[1])):
        at = bisect_right(starts, start) - 1
        if at >= 0 and start < outside[at][1]:
            continue
        if not found or end > found[-1][1]:
            found.append((start, end))
    return found


def _on_device(passes: Sequence[TimedPass], kernels: Iterable[Kernel]) -> list[TimedPass]:
    ordered = sorted(passes, key=lambda p: p.start)
    starts = [p.start for p in ordered]
    spans: dict[int, tuple[float, float]] = {}
    for kernel in kernels:
        at = bisect_right(starts, kernel.launched) - 1
        if at < 0 or kernel.launched > ordered[at].end or 'nccl' in kernel.name.lower():
            continue
        start, end = spans.get(at, (kernel.start, kernel.end))
        spans[at] = min(start, kernel.start), max(end, kernel.end)
    return [
        own._replace(start=spans[at][0], end=spans[at][1])
        for at, own in enumerate(ordered)
        if at in spans
    ]


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
            name, own = str(event.get('name', '')), event.get('args')
            key = own.get('correlation') if is_object(own) else None
            key = key if isinstance(key, int) else None
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


def _ranks(info: object) -> tuple[int | None, tuple[int, ...]]:
    """Return the rank of the process, and the ranks of its pipeline; None and (): unknown."""
    if not is_object(info) or not isinstance(info.get('rank'), int):
        return None, ()
    rank: int = info['rank']
    groups = info.get('pg_config')
    for group in groups if is_list(groups) else ():
        if is_object(group) and group.get('pg_desc') == _PIPELINE:
            ranks = group.get('ranks')
            if is_list(ranks) and rank in ranks:
                return rank, tuple(each for each in ranks if isinstance(each, int))
    return rank, ()


def read_report(path: Path) -> list[Recording]:
    """Return the recordings of a report, one for each process, by their ids."""
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
    return int(thread) >> 24 & 0xFFFFFF


def _seconds(nanoseconds: Any) -> float:
    if not isinstance(nanoseconds, int) or nanoseconds < 0:
        raise sqlite3.DataError(f'{nanoseconds!r} is no time in nanoseconds')
    return nanoseconds * _NANO


HALF = 0.5  # of a backward counts as W where nothing tells


class Measured(NamedTuple):
    """Times of stages, in seconds."""

    layout: str  # layers of the stages, as `Ett|ttL`
    costs: Costs  # of the stages; activations are those of `Costs`, as no source tells them
    # a sentence each: what the source could not tell, and what was assumed instead
    notes: tuple[str, ...] = ()
    joined: bool = False  # whether a stage is all that a rank has: chunks were not told apart
    # as `Placement.routes`; empty: the source does not tell
    routes: tuple[tuple[int, ...], ...] = ()


def from_recordings(
    recordings: Sequence[Recording], layout: str, weight_share: float | None = None
) -> Measured:
    """Return the times of stages: medians over all passes of a stage, in all recordings."""
    stages = len(layout.split('|'))
    of_stages: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    placed: list[tuple[Recording, list[TimedPass]]] = []
    for recording, place, ranks in _places(recordings, stages):
        passes = _placed(find_passes(recording), place, ranks, stages)
        if not passes:
            raise ValueError(
                f'{recording.source} has no forward nor backward: profile whole iterations of '
                'training, and let the profiler record CPU activities (of Nsight: -t nvtx,cuda)'
            )
        placed.append((recording, passes))
        for own in passes:
            of_stages[own.kind, own.stage or 0, own.slice].append(own.end - own.start)
    for kinds, word in (((F,), 'forward'), ((B, BW), 'backward')):
        known = {stage for kind, stage, _ in of_stages if kind in kinds}
        if missing := sorted(set(range(stages)) - known):
            raise ValueError(
                f'{", ".join(own.source for own in recordings[:4])}: no {word} of stage '
                f'{", ".join(map(str, missing[:8]))} of {stages}: give the recordings of all '
                'pipeline ranks, of whole iterations (Megatron: without --profile-ranks)'
            )
    times: dict[tuple[str, int], float] = defaultdict(float)
    for (kind, stage, _), took in of_stages.items():
        times[kind, stage] += median(took)
    costs, notes = divided(times, stages, weight_share)
    comm = message_time(placed, stages)
    if comm is None:
        notes.append('messages: not told; --write-devices gives links that take no time')
    costs = Costs(costs.times, comm=comm or 0.0)
    if others := sorted({kind for kind, _ in times} - {F, B, W, BW}):
        notes.append(f'passes {", ".join(others)}: left out, as they are of no layer')
    return Measured(layout, costs, tuple(notes))


def _places(recordings: Sequence[Recording], stages: int) -> list[tuple[Recording, int, int]]:
    if all(own.rank in own.pipeline for own in recordings):
        return [(r, r.pipeline.index(r.rank or 0), len(r.pipeline)) for r in recordings]
    known = [own.rank for own in recordings if own.rank is not None]
    ordered = list(recordings)
    if len(known) == len(recordings) == len(set(known)):
        ordered.sort(key=lambda own: own.rank or 0)
    ranks = min(stages, len(ordered))
    if len(ordered) % ranks:
        ranks = len(ordered)
    return [(own, at * ranks // len(ordered), ranks) for at, own in enumerate(ordered)]


def _placed(passes: Sequence[TimedPass], place: int, ranks: int, stages: int) -> list[TimedPass]:
    """Return passes with their stages: as named, or as the interleaved schedule runs chunks."""
    if passes and passes[0].stage is not None:
        most = max(own.stage or 0 for own in passes)
        if most >= stages:
            raise ValueError(
                f'the layout has {stages} stages, and a pass of stage {most} was recorded: give '
                '--layout as the job has it, a part for each stage in model order'
            )
        return list(passes)
    if stages % ranks:
        raise ValueError(
            f'{stages} stages of the layout do not divide among {ranks} ranks: give the '
            'recordings of all pipeline ranks, and --layout as the job has it'
        )
    chunks, found = stages // ranks, list[TimedPass]()
    for own in passes:
        group, within = divmod(own.number, ranks)
        chunk = group % chunks if own.kind == F else chunks - 1 - group % chunks
        number = group // chunks * ranks + within
        found.append(own._replace(stage=chunk * ranks + place, number=number))
    return found


def divided(
    times: Mapping[tuple[str, int], float], stages: int, weight_share: float | None
) -> tuple[Costs, list[str]]:
    """Return costs with B and W apart, and notes of how that was done.

    `times` are by kind and stage. BW, or B where no stage has W, is of both; `weight_share` is that
    of W in such a backward, a half by default.
    """
    apart = any(kind == W and time for (kind, _), time in times.items())
    share = HALF if weight_share is None else weight_share
    found: dict[str, list[float]] = {F: [], B: [], W: []}
    halved = False
    for stage in range(stages):
        forward, b, w, bw = (times.get((kind, stage), 0.0) for kind in (F, B, W, BW))
        if not apart or (bw and not b):  # one backward
            halved, bw = True, b or bw
            b, w = bw * (1 - share), bw * share
        for kind, time in ((F, forward), (B, b), (W, w)):
            found[kind].append(time)
    if weight_share is not None and not halved:
        raise ValueError('--weight-share, but W was measured apart from B: leave it out')
    notes: list[str] = []
    if halved:
        how = 'half of it counts as W' if weight_share is None else f'{share:g} of it counts as W'
        cure = '; --weight-share gives another share' if weight_share is None else ''
        notes.append(f'W: not told apart from B; the backward was measured, and {how}{cure}')
    return Costs({kind: tuple(own) for kind, own in found.items()}), notes


def message_time(
    placed: Sequence[tuple[Recording, Sequence[TimedPass]]], stages: int
) -> float | None:
    """Return seconds from a pass's end to the start of the pass on another rank that takes it.

    The shortest that was seen, forwards and backwards taken together, so that clocks which differ
    do not matter; the median over neighbours. None: no pair of neighbours tells.
    """
    pipelines: dict[tuple[int, ...], list[Sequence[TimedPass]]] = defaultdict(list)
    for recording, passes in placed:
        pipelines[recording.pipeline].append(passes)
    lags: list[float] = []
    for own in pipelines.values():
        at: dict[int, int] = {}
        for rank, passes in enumerate(own):
            for stage in {p.stage or 0 for p in passes}:
                at[stage] = rank if stage not in at else -1  # several replicas: none tells
        for stage in range(stages - 1):
            if -1 not in (a := at.get(stage, -1), b := at.get(stage + 1, -1)) and a != b:
                there = _lag(own[a], stage, own[b], stage + 1, (F,))
                back = _lag(own[b], stage + 1, own[a], stage, (B, BW))
                if there is not None and back is not None:
                    lags.append(fsum((there, back)) / 2)
    return max(0.0, median(lags)) if lags else None


def _lag(
    sender: Sequence[TimedPass],
    of: int,
    receiver: Sequence[TimedPass],
    to: int,
    kinds: Sequence[str],
) -> float | None:
    """Return the shortest time between passes of two stages; None: not as many were recorded."""
    ends = {(p.slice, p.number): p.end for p in sender if p.stage == of and p.kind in kinds}
    starts = {(p.slice, p.number): p.start for p in receiver if p.stage == to and p.kind in kinds}
    if not ends or ends.keys() != starts.keys():
        return None
    return min(starts[key] - ends[key] for key in ends)
