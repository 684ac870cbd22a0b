"""Small stages that run as a pipeline whose clocks do not agree."""

import time

import torch.distributed as dist
from stages import LinearStage, Pipeline

from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.measure import Iteration

PASS = 0.002  # seconds, at least


class ShiftedClock(HostClock):
    """One of a host that was started at another time."""

    def __init__(self, ahead):
        self._ahead = ahead

    def mark(self):
        return super().mark() + self._ahead

    def now(self):
        return super().now() + self._ahead


class SlowStage(LinearStage):
    def forward(self, p, received):
        time.sleep(PASS)
        return super().forward(p, received)


class TimedPipeline(Pipeline):
    """Runs `schedule` on the ranks of the world, many times."""

    def __init__(self, schedule, clock):
        super().__init__(schedule, stage_class=SlowStage, kept=False, clock=clock)

    def run(self):
        return Iteration(self.schedule, dist.group.WORLD, super().run(), self.options['clock'])
