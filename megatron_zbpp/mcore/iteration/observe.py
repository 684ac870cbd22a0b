"""Measures Megatron's own schedules without touching them: the reference beside ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron_zbpp.ir import BW, F, Pass
from megatron_zbpp.mcore.patches.registry import replaced
from megatron_zbpp.runtime.clock import Record, clock_for
from megatron_zbpp.runtime.measure import Figures, Interval, Iteration
from megatron_zbpp.schedules import build


class Observer:
    """Times the forward and backward steps of non-interleaved 1F1B on one rank."""

    def __init__(self, device: torch.device, pp_group: dist.ProcessGroup) -> None:
        self._device, self._pp_group, self._stage = device, pp_group, dist.get_rank(pp_group)
        self._clock, self._record, self._interval = clock_for(device), Record(), Interval()
        self._live = self._backwards = 0

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
        if self._backwards:  # an iteration of training has ended
            self._interval.add(self.latest)
            self._backwards = 0

    def timed(self, step: Callable, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Run Megatron's `forward_step` or `backward_step`, timed."""
        microbatch = kwargs['current_microbatch'] if kind == F else self._backwards
        if kind == F and microbatch == 0:
            self._note()
            self._record, self._live = Record(), 0
            self._clock = clock_for(self._device)
        self._live += 1 if kind == F else -1
        self._backwards += kind == BW
        start = self._clock.mark()
        result = step(*args, **kwargs)
        self._record.marks.append((start, self._clock.mark()))
        self._record.passes.append(Pass(kind, self._stage, microbatch))
        self._record.live.append(self._live)
        return result


@contextmanager
def observe(device: torch.device, pp_group: dist.ProcessGroup) -> Iterator[Observer]:
    """Time what Megatron's 1F1B runs on this rank while inside."""
    observer = Observer(device, pp_group)
    with ExitStack() as stack:
        for name, kind in (('forward_step', F), ('backward_step', BW)):
            step = functools.partial(observer.timed, getattr(schedules, name), kind)
            stack.enter_context(replaced(schedules, name, step))
        yield observer
