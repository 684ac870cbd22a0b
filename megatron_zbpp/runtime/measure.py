"""What all ranks of a pipeline measured in one iteration, put together."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch.distributed as dist

from megatron_zbpp.ir import Placement, Schedule
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


def gather(
    name: str, placement: Placement, record: Record, clock: Clock, pp_group: dist.ProcessGroup
) -> Measurement:
    """The measurement of all ranks of `pp_group`, on each of them: a collective.

    Args:
        name: of the schedule that ran.
        placement: its placement.
        record: of this rank.
        clock: that took its marks; the ranks' clocks must agree, as on one machine.
        pp_group: the pipeline.
    """
    spans = tuple((clock.seconds(start), clock.seconds(end)) for start, end in record.marks)
    peak = max(record.live, default=0) / len(placement.stages(dist.get_rank(pp_group)))
    own = (tuple(record.passes), spans, peak)
    gathered: list[tuple] = [()] * dist.get_world_size(pp_group)
    dist.all_gather_object(gathered, own, group=pp_group)
    passes, all_spans, peaks = zip(*gathered, strict=True)
    num_microbatches = 1 + max(p.microbatch for order in passes for p in order)
    schedule = Schedule.of(name, placement, num_microbatches, passes)
    return Measurement(Timeline(schedule, all_spans), peaks)
