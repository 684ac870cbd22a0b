"""Small stages that run as a pipeline whose clocks do not agree."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from programs import pairs
from stages import ROWS, WIDTH, LinearStage

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore

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


class Pipeline:
    """Runs `schedule` on the ranks of the world, many times."""

    def __init__(self, schedule, clock):
        self.schedule, self.clock = schedule, clock
        self._programs = lower(schedule)
        self._channels = Channels(dist.group.WORLD, pairs(self._programs), torch.device('cpu'))
        self._store = WeightGradStore()
        self._stages = {
            stage: SlowStage(self._store, stage, schedule.num_stages)
            for stage in schedule.placement.stages(dist.get_rank())
        }

    def run(self):
        message = Message((ROWS, WIDTH), torch.float32, torch.device('cpu'))
        program = self._programs[dist.get_rank()]
        executor = Executor(program, self._stages, self._channels, message, self._store, self.clock)
        return Iteration(self.schedule, dist.group.WORLD, executor.run(), self.clock)
