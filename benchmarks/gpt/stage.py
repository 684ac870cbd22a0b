"""One stage of a model alone on one device: what F, B and W take, and what they hold.

The stage is a middle one: layers only. Passes are run by the executor, as in a pipeline; input and
gradient are there already in place of messages.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpt import device
from benchmarks.gpt.jobs import Job
from benchmarks.gpt.models import find
from benchmarks.gpt.worker import Progress, Row, work

DEVICE = device.find()  # before megatron.core is imported

import megatron_zbpp  # noqa: E402
from benchmarks.gpt import build  # noqa: E402
from megatron_zbpp.ir import BW, B, F, Pass, W  # noqa: E402
from megatron_zbpp.mcore.iteration.stages import (  # noqa: E402
    Arguments,
    Call,
    ModelStage,
)
from megatron_zbpp.mcore.layers import transformer_engine  # noqa: E402
from megatron_zbpp.runtime.channels import Channels, Message  # noqa: E402
from megatron_zbpp.runtime.clock import clock_for  # noqa: E402
from megatron_zbpp.runtime.executor import Executor  # noqa: E402
from megatron_zbpp.runtime.weight_grads import WeightGradStore  # noqa: E402

_SPLIT, _FUSED = (F, B, W), (F, BW)


class Alone:
    """The executor's stage: `inner` with an input and a gradient of its own.

    Args:
        inner: the real one.
        message: what its neighbours would send.

    Attributes:
        held: bytes on the device: before F, before B, before W, after W; of the latest microbatch.
    """

    def __init__(self, inner: ModelStage, message: Message) -> None:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(message.shape, generator=generator)
        self._values = values.to(message.device, message.dtype)
        self._gradient = (values * 1e-3).to(message.device, message.dtype)
        self._inner = inner
        self._received: dict[int, torch.Tensor] = {}
        self._weighs = False
        self.held: list[int] = []

    def weighing(self, weighs: bool) -> None:
        """Whether `held` is written down: it takes time."""
        self._weighs = weighs

    def forward(self, p: Pass, received: None) -> torch.Tensor:
        self.held.clear()
        self._weigh()
        own = self._values.clone().requires_grad_()
        self._received[p.microbatch] = own
        return self._inner.forward(p, own)

    def backward(self, p: Pass, received: None, output: torch.Tensor, gradient: None) -> None:
        own = self._received.pop(p.microbatch)
        self._inner.backward(p, own, output, self._gradient)  # the result would be on its way

    def release(self, output: torch.Tensor) -> None:
        self._inner.release(output)

    @contextmanager
    def grad_sync(self, last: bool) -> Iterator[None]:
        self._weigh()
        with self._inner.grad_sync(last):
            yield

    def weigh_last(self) -> None:
        """Raise where something is still held when all is done."""
        self._weigh()

    def _weigh(self) -> None:
        if self._weighs:
            self.held.append(DEVICE.held_bytes())


class Bench:
    """One stage, built for one way of its backward.

    Args:
        job: what it is of.
        splits: whether its weight gradients wait for W.
        store: where they wait.
    """

    def __init__(self, job: Job, splits: bool, store: WeightGradStore) -> None:
        model = find(job.model)
        settings = build.config(job, model, [model.stage_layers])
        if splits and build.layers_of(job.spec) == 'te':
            transformer_engine.delay_weight_gradients(settings)
        chunk = build.chunk(job, model, settings, False, False, None)
        self.models = build.wrap(settings, [chunk], DEVICE)
        self._store = store
        self._kinds = _SPLIT if splits else _FUSED
        shape = model.sequence, job.micro_batch, model.hidden
        self._message = Message(shape, torch.bfloat16, DEVICE.torch)
        arguments = Arguments(
            forward_step_func=_forward_step,
            data_iterator=None,
            model=self.models,
            num_microbatches=1,
            seq_length=model.sequence,
            micro_batch_size=job.micro_batch,
        )
        call = Call(arguments, store, 1, DEVICE.torch)
        self.stage = Alone(
            ModelStage(call, self.models[0], iter(lambda: None, 0), None, False), self._message
        )
        self._channels = Channels(dist.group.WORLD, [], DEVICE.torch)

    @property
    def parameters(self) -> int:
        """How many numbers the stage has."""
        return sum(p.numel() for p in self.models[0].parameters())

    def times(self, microbatches: int) -> list[tuple[float, ...]]:
        """Return seconds of the passes of each microbatch."""
        self.models[0].zero_grad_buffer()
        program = tuple(Pass(kind, 0, k) for k in range(microbatches) for kind in self._kinds)
        executor = Executor(
            program,
            {0: self.stage},
            self._channels,
            self._message,
            self._store,
            clock_for(DEVICE.torch),
        )
        record = executor.run()
        DEVICE.synchronize()
        seconds = executor.clock.seconds
        spans = [seconds(end) - seconds(start) for start, end in record.marks]
        width = len(self._kinds)
        return [tuple(spans[i : i + width]) for i in range(0, len(spans), width)]

    def activations(self) -> tuple[int, int, int]:
        """Return bytes of a microbatch from F to B, and from B to W; and what is never let go."""
        gc.collect()
        self.stage.weighing(True)
        with DEVICE.following():
            self.times(1)
            self.stage.weigh_last()
        self.stage.weighing(False)
        empty, before_b, before_w, after = self.stage.held
        # Megatron's model keeps its latest input, with the gradient, whatever the schedule
        return before_b - empty, before_w - after, after - empty


def measure(job: Job, progress: Progress) -> Row:
    """Return the row of `job`."""
    build.join(job, DEVICE)
    with megatron_zbpp.enable('zb-h1') as plugin:
        progress('F, B and W')
        DEVICE.reset_peak()
        bench = Bench(job, True, plugin.session.store)
        parameters = bench.parameters
        split = _samples(job, bench)
        held = bench.activations()
        progress('optimizer')
        step = _optimizer_seconds(job, bench)
        peak = DEVICE.peak_bytes()
        del bench
        gc.collect()
        progress('fused backward')
        fused = _samples(job, Bench(job, False, plugin.session.store))
    dist.destroy_process_group()
    return _row(job, split, fused, held, step, parameters, peak)


def _samples(job: Job, bench: Bench) -> list[tuple[float, ...]]:
    return bench.times(job.warm_up + job.iterations)[job.warm_up :]


def _optimizer_seconds(job: Job, bench: Bench) -> float:
    """Return a step of Megatron's optimizer on this stage, without other ranks."""
    optimizer = build.optimizer(bench.models)
    seconds = []
    for _ in range(job.warm_up + job.iterations):
        DEVICE.synchronize()
        start = time.perf_counter()
        optimizer.step()
        DEVICE.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[job.warm_up :])


def _forward_step(data: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Megatron calls this; the stage's input has been set already."""
    return model(None, None, None), lambda output: output


def _medians(samples: Sequence[tuple[float, ...]]) -> list[float]:
    return [median(kind) for kind in zip(*samples, strict=True)]


def _row(
    job: Job,
    split: list[tuple[float, ...]],
    fused: list[tuple[float, ...]],
    held: tuple[int, int, int],
    step: float,
    parameters: int,
    peak: int,
) -> Row:
    """Return what was measured."""
    model = find(job.model)
    f, b, w = _medians(split)
    fused_f, fused_bw = _medians(fused)
    flops = model.stage_layers * model.layer_flops * job.micro_batch * model.sequence
    return {
        'layers': model.stage_layers,
        'parameters': parameters,
        'f_seconds': f,
        'b_seconds': b,
        'w_seconds': w,
        'fused_f_seconds': fused_f,
        'fused_bw_seconds': fused_bw,
        'split_over_fused': (f + b + w) / (fused_f + fused_bw),
        'samples': split,
        'fused_samples': fused,
        'b_bytes': held[0],
        'w_bytes': held[1],
        'left_bytes': held[2],
        'message_bytes': 2 * job.micro_batch * model.sequence * model.hidden,
        'optimizer_seconds': step,
        'tflops_per_gpu': flops / (f + b + w) / 1e12,
        'peak_bytes': peak,
        'layers_of': build.layers_of(job.spec),
        'device': DEVICE.name,
        'device_peak_tflops': DEVICE.peak_tflops,
        'device_bytes': DEVICE.total_bytes,
    }


if __name__ == '__main__':
    work(measure)
