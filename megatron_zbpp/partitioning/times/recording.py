"""Passes of one process in what a profiler recorded: ranges of the host, kernels of the device.

Passes are found by the first of three that a recording has: our own ranges (`PP:1F0`); Megatron's
`forward_step` and `backward_step` in recorded call stacks; operations of autograd, of which
messages between stages and the change from forward to backward divide one pass from the next.

>>> recording = Recording('a.json', (Range('PP:0F0', 0.0, 1.0), Range('PP:0B0', 2.0, 4.0)))
>>> [(p.kind, p.stage, p.end - p.start) for p in find_passes(recording)]
[('F', 0, 1.0), ('B', 0, 2.0)]
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_zbpp.ir import BW, F, Pass

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
    """Return whether a range of this name tells anything of passes."""
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
    """Return the passes that our ranges name."""
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
    """Return the passes that call stacks name: calls of Megatron's schedules."""
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
    """Return the passes from their first to their last kernel."""
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
