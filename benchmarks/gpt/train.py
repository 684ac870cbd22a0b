"""One rank of one configuration: trains on random words and says how fast."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpt import device
from benchmarks.gpt.jobs import MEGATRON, Job
from benchmarks.gpt.models import find
from benchmarks.gpt.worker import Progress, Row, work

DEVICE = device.find()  # before megatron.core is imported

from megatron.core.pipeline_parallel import get_forward_backward_func, schedules  # noqa: E402

import megatron_zbpp  # noqa: E402
from benchmarks.gpt import build  # noqa: E402
from megatron_zbpp.ir import Placement  # noqa: E402
from megatron_zbpp.runtime.clock import clock_for  # noqa: E402

Marks = list[tuple[object, object]]  # start and end of each pass


def measure(job: Job, progress: Progress) -> Row:
    """Return the row of `job`, the same on every rank."""
    progress('building the model')
    model = find(job.model)
    with ExitStack() as stack:
        if job.runner == MEGATRON:
            placement = Placement.loop(job.p, job.chunks)
            marks = stack.enter_context(_marked())
            latest = marks.copy
        else:
            plugin = stack.enter_context(megatron_zbpp.enable(job.schedule, job.chunks))
            placement = plugin.session.programs.placement(job.p)
            latest = lambda: plugin.latest.record.marks  # noqa: E731
            marks = []
        build.join(job, DEVICE)
        settings, chunks = build.chunks(job, model, placement)
        models = build.wrap(settings, chunks, DEVICE)
        optimizer = build.optimizer(models)
        data = [build.batches(job, model, DEVICE) for _ in models]
        DEVICE.reset_peak()
        samples, bubbles, lost, loss = [], [], [], math.nan
        for index in range(-job.warm_up, job.iterations):
            progress(f'iteration {index + 1 + job.warm_up}/{job.warm_up + job.iterations}')
            marks.clear()
            seconds, bubble, idle, loss = _iteration(job, models, optimizer, data, latest)
            if index >= 0:
                samples.append(seconds)
                bubbles.append(bubble)
                lost.append(idle)
    row = _row(job, samples, bubbles, lost, loss)
    dist.barrier()
    dist.destroy_process_group()
    return row


def _iteration(
    job: Job, models: list, optimizer: Any, data: list[Iterator], latest: Callable[[], Marks]
) -> tuple[float, float, float, float]:
    """Seconds, bubble, what all ranks idle, and loss of one iteration: the same on all ranks."""
    dist.barrier()
    DEVICE.synchronize()
    clock = clock_for(DEVICE.torch)
    start, begun = time.perf_counter(), clock.mark()
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    many = len(models) > 1
    results = get_forward_backward_func()(
        forward_step_func=build.forward_step,
        data_iterator=data if many else data[0],
        model=models if many else models[0],
        num_microbatches=job.m,
        seq_length=find(job.model).sequence,
        micro_batch_size=job.micro_batch,
    )
    optimizer.step()
    DEVICE.synchronize()
    seconds = time.perf_counter() - start
    loss = sum(r['lm loss'].item() for r in results) / job.m if results else -math.inf
    # each rank's clock is its own: only differences on one rank are compared
    marks = latest()
    busy = sum(clock.seconds(end) - clock.seconds(begin) for begin, end in marks)
    span = clock.seconds(marks[-1][1]) - clock.seconds(begun)
    seconds, busiest, span, loss = _largest(seconds, busy, span, loss)
    mean = _of_all(dist.ReduceOp.SUM, busy)[0] / dist.get_world_size()
    return seconds, 1 - busiest / span, 1 - mean / span, loss


@contextmanager
def _marked() -> Iterator[Marks]:
    """Start and end of each forward and backward step of Megatron's own schedules."""
    clock = clock_for(DEVICE.torch)
    marks: Marks = []
    originals = {name: getattr(schedules, name) for name in ('forward_step', 'backward_step')}

    def marked(step: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock.mark()
            result = step(*args, **kwargs)
            marks.append((start, clock.mark()))
            return result

        return call

    for name, step in originals.items():
        setattr(schedules, name, marked(step))
    try:
        yield marks
    finally:
        for name, step in originals.items():
            setattr(schedules, name, step)


def _largest(*values: float) -> list[float]:
    """Each value's maximum over all ranks."""
    return _of_all(dist.ReduceOp.MAX, *values)


def _of_all(reduction: dist.ReduceOp, *values: float) -> list[float]:
    """Each value, reduced over all ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=DEVICE.torch)
    dist.all_reduce(found, reduction)
    return found.tolist()


def _row(
    job: Job, samples: list[float], bubbles: list[float], lost: list[float], loss: float
) -> Row:
    """Return what was measured.

    Raises:
        ValueError: the loss is not a number: this was no training.
    """
    if not math.isfinite(loss):
        raise ValueError(f'the loss is {loss}: what was timed was no training')
    model, seconds = find(job.model), median(samples)
    gpus = dist.get_world_size()
    tflops = model.flops(job.samples, job.t) / seconds / gpus / 1e12
    peak = int(_largest(DEVICE.peak_bytes())[0])
    return {
        'seconds': samples,
        'median_seconds': seconds,
        'tokens_per_second_per_gpu': job.samples * model.sequence / seconds / gpus,
        'tflops_per_gpu': tflops,
        'peak_bytes': peak,
        'bubble': median(bubbles),
        'idle_all_ranks': median(lost),
        'loss': loss,
        'layers_of': build.layers_of(job.spec),
        'device': DEVICE.name,
        'device_peak_tflops': DEVICE.peak_tflops,
    }


if __name__ == '__main__':
    work(measure)
