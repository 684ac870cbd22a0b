"""What all ranks of a pipeline measured in one iteration, put together."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch.distributed as dist

from megatron_zbpp.ir import Schedule
from megatron_zbpp.planning.timeline import Timeline
from megatron_zbpp.runtime.clock import Clock
from megatron_zbpp.runtime.executor import Record


@dataclass(frozen=True)
class Measurement:
    """One iteration as it was.

    Attributes:
        timeline: passes with start and end in seconds of the host's clock.
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
        """The measurement that `to_json` wrote."""
        data = json.loads(text)
        spans = tuple(tuple((start, end) for start, end in rank) for rank in data['spans'])
        schedule = Schedule.from_json(json.dumps(data['schedule']))
        return cls(Timeline(schedule, spans), tuple(data['peak_activations']))


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

    def gather(self) -> Measurement:
        """The same iteration of all ranks: a collective; for clocks that agree, as on one host."""
        marks, live = self.record.marks, self.record.live
        spans = tuple((self.clock.seconds(start), self.clock.seconds(end)) for start, end in marks)
        chunks = len(self.schedule.placement.stages(dist.get_rank(self.pp_group)))
        gathered: list[tuple] = [()] * dist.get_world_size(self.pp_group)
        own = (spans, max(live, default=0) / chunks)
        dist.all_gather_object(gathered, own, group=self.pp_group)
        all_spans, peaks = zip(*gathered, strict=True)
        return Measurement(Timeline(self.schedule, all_spans), peaks)
