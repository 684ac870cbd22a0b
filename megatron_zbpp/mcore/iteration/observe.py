"""Measures Megatron's own schedules without touching them: the reference beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron_zbpp.ir import BW, F, Pass
from megatron_zbpp.runtime.clock import Record, clock_for
from megatron_zbpp.runtime.measure import Figures, Interval, Iteration
from megatron_zbpp.schedules import build


class Observer:
    """Times the forward and backward steps of non-interleaved 1F1B on one rank."""

    def __init__(self, device: torch.device, pp_group: dist.ProcessGroup) -> None:
        self._device = device
        self._clock = clock_for(device)
        self._record = Record()
        self._pp_group = pp_group
        self._stage = dist.get_rank(pp_group)
        self._live = 0
        self._backwards = 0
        self._interval = Interval()

    @property
    def latest(self) -> Iteration:
        """The latest iteration of this rank."""
        size = dist.get_world_size(self._pp_group)
        num_microbatches = sum(p.kind == F for p in self._record.passes)
        schedule = replace(build('1f1b', size, num_microbatches), name="Megatron's 1F1B")
        assert tuple(self._record.passes) == schedule.passes[self._stage], 'not what Megatron ran'
        return Iteration(schedule, self._pp_group, self._record, self._clock)

    def figures(self) -> Figures | None:
        """Return the mean since this was last asked: a collective of the pipeline."""
        self._note()
        return self._interval.figures()

    def _note(self) -> None:
        """Take note of an iteration that has ended, if it was one of training."""
        if self._backwards:
            self._interval.add(self.latest)
            self._backwards = 0

    def forward(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run Megatron's `forward_step`, timed."""
        microbatch = kwargs['current_microbatch']
        if microbatch == 0:
            self._note()
            self._record, self._live = Record(), 0
            self._clock = clock_for(self._device)
        self._live += 1
        return self._timed(Pass(F, self._stage, microbatch), step, *args, **kwargs)

    def backward(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run Megatron's `backward_step`, timed."""
        microbatch = self._backwards
        self._backwards += 1
        self._live -= 1
        return self._timed(Pass(BW, self._stage, microbatch), step, *args, **kwargs)

    def _timed(self, p: Pass, step: Callable, *args: Any, **kwargs: Any) -> Any:
        start = self._clock.mark()
        result = step(*args, **kwargs)
        self._record.marks.append((start, self._clock.mark()))
        self._record.passes.append(p)
        self._record.live.append(self._live)
        return result


@contextmanager
def observe(device: torch.device, pp_group: dist.ProcessGroup) -> Iterator[Observer]:
    """Time what Megatron's 1F1B runs on this rank while inside."""
    observer = Observer(device, pp_group)
    forward_step, backward_step = schedules.forward_step, schedules.backward_step

    def forward(*args: Any, **kwargs: Any) -> Any:
        return observer.forward(forward_step, *args, **kwargs)

    def backward(*args: Any, **kwargs: Any) -> Any:
        return observer.backward(backward_step, *args, **kwargs)

    schedules.forward_step, schedules.backward_step = forward, backward
    try:
        yield observer
    finally:
        schedules.forward_step, schedules.backward_step = forward_step, backward_step
