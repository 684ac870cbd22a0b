"""What all ranks of a pipeline measured in one iteration, put together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum
from statistics import median

import torch.distributed as dist

from megatron_zbpp.ir import F, Schedule, W
from megatron_zbpp.ir.timeline import Timeline, idle
from megatron_zbpp.runtime.clock import Clock
from megatron_zbpp.runtime.observe.clock_sync import lead_of_neighbour, on_one_clock
from megatron_zbpp.runtime.observe.record import Record


@dataclass(frozen=True)
class Measurement:
    """One iteration as it was.

    Attributes:
        timeline: passes with start and end in seconds of the first rank's clock.
        peak_activations: most that each rank held, in activations of one microbatch on a full rank.
    """

    timeline: Timeline
    peak_activations: tuple[float, ...]

    def to_json(self) -> str:
        """One JSON object; `from_json` reads it back to an equal value."""
        return json.dumps(
            {
                'schedule': json.loads(self.timeline.schedule.to_json()),
                'spans': self.timeline.spans,
                'peak_activations': self.peak_activations,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Return the measurement that `to_json` wrote."""
        data = json.loads(text)
        spans = tuple(tuple((start, end) for start, end in rank) for rank in data['spans'])
        schedule = Schedule.from_json(json.dumps(data['schedule']))
        return cls(Timeline(schedule, spans), tuple(data['peak_activations']))


@dataclass(frozen=True)
class Figures:
    """One iteration in three numbers, which need no common clock.

    Attributes:
        bubble: share of the longest window in which even the busiest rank idles.
        idle: share of all ranks' time in the longest window that no pass takes: what is lost.
        live: most that any rank held, in activations of one microbatch on a full rank.
    """

    bubble: float
    idle: float
    live: float

    def __str__(self) -> str:
        return (
            f'pipeline bubble: {self.bubble:.1%} | idle, all ranks: {self.idle:.1%} | '
            f'live activations: {self.live:.1f} |'
        )


@dataclass(frozen=True)
class Iteration:
    """What one rank remembers of one iteration.

    Attributes:
        schedule: that ran.
        pp_group: the pipeline.
        record: this rank's passes.
        clock: that took the record's marks.
    """

    schedule: Schedule
    pp_group: dist.ProcessGroup
    record: Record
    clock: Clock

    def spans(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each pass in seconds of this host's clock; may synchronise."""
        seconds = self.clock.seconds
        return tuple((seconds(start), seconds(end)) for start, end in self.record.marks)

    def peak(self) -> float:
        """Most that this rank held, in activations of one microbatch on a full rank."""
        chunks = len(self.schedule.placement.stages(dist.get_rank(self.pp_group)))
        return max(self.record.live, default=0) / chunks

    def held(self) -> dict[int, tuple[float, float]]:
        """By stage of this rank: bytes held from F to B, and from B to W, which may be more.

        Medians of what each F adds and each W gives back; nothing where the clock does not count. A
        stage whose Ws are all fused with Bs counts as one that gives nothing back before.
        """
        taken: dict[tuple[int, str], list[int]] = defaultdict(list)
        for p, marks in zip(self.record.passes, self.record.marks, strict=True):
            before, after = map(self.clock.allocated, marks)
            if before is None or after is None:
                return {}
            taken[p.stage, p.kind].append(after - before)
        found = {}
        for stage in {stage for stage, _ in taken}:
            left = max(0.0, median(taken[stage, F]))
            weights = taken.get((stage, W))
            found[stage] = left, max(0.0, -median(weights)) if weights else left
        return found

    def gather(self) -> Measurement:
        """Return the same iteration of all ranks, on one clock: a collective."""
        lead = lead_of_neighbour(self.clock, self.pp_group)
        spans, peaks, leads = self._from_all((self.spans(), self.peak(), lead))
        return Measurement(on_one_clock(Timeline(self.schedule, spans), leads), peaks)

    def figures(self) -> Figures:
        """Return what a log line tells of the same iteration on all ranks: a small collective."""
        spans = self.spans()
        window = spans[-1][1] - spans[0][0] if spans else 0.0
        busy = fsum(end - start for start, end in spans)
        windows, work, peaks = self._from_all((window, busy, self.peak()))
        lost = idle(max(windows) * len(work), fsum(work))
        return Figures(idle(max(windows), max(work)), lost, max(peaks))

    def _from_all(self, own: tuple) -> Iterator[tuple]:
        """Each entry of what all ranks have, by rank."""
        gathered: list[tuple] = [()] * dist.get_world_size(self.pp_group)
        dist.all_gather_object(gathered, own, group=self.pp_group)
        return zip(*gathered, strict=True)
