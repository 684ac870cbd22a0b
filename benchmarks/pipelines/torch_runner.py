"""torch.distributed.pipelining on the emulated model, its backward split by `dw_builder`."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from benchmarks.pipelines import emulated
from benchmarks.pipelines.emulated import EmulatedChunk, Meter, Times
from megatron_zbpp.ir import Placement, Schedule, formats
from megatron_zbpp.schedules import build

# name: their class, and where its stages are
_CLASSES: dict[str, tuple[type, Callable[[int], Placement]]] = {
    '1F1B': (torch_schedules.Schedule1F1B, Placement.loop),
    'Interleaved1F1B': (torch_schedules.ScheduleInterleaved1F1B, lambda p: Placement.loop(p, 2)),
    'InterleavedZeroBubble': (
        torch_schedules.ScheduleInterleavedZeroBubble,
        lambda p: Placement.loop(p, 2),
    ),
    'ZBVZeroBubble': (torch_schedules.ScheduleZBVZeroBubble, Placement.v),
    'DualPipeV': (torch_schedules.ScheduleDualPipeV, Placement.v),
}


def order(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Return what torch will run, as a schedule of ours.

    Raises:
        ValueError: torch has none for this p and m.
    """
    family, placed = _CLASSES[name]
    placement = placed(num_ranks)
    stages = [  # all that torch asks of rank 0's stages to write down an order
        SimpleNamespace(
            stage_index=stage,
            num_stages=placement.num_stages,
            group_size=num_ranks,
            group_rank=0,
            submod=None,
        )
        for stage in placement.stages(0)
    ]
    if issubclass(family, torch_schedules.PipelineScheduleSingle):
        family(stages[0], num_microbatches)  # refuses, if it does
        return build(name, num_ranks, num_microbatches)  # torch's own drawing of 1F1B is wrong
    file = io.StringIO(newline='')
    csv.writer(file).writerows(family(stages, num_microbatches).pipeline_order.values())
    return formats.from_torch_csv(file.getvalue(), name)


class _Deferred:
    """The weight gradients of one stage between torch's B and its W: `dw_builder` takes them."""

    deferring = True

    def __init__(self) -> None:
        self._pending: list[tuple[Sequence[torch.nn.Parameter], Callable]] = []

    def defer(self, parameters: Sequence[torch.nn.Parameter], compute: Callable) -> None:
        self._pending.append((parameters, compute))

    def dw_builder(self) -> Callable[[], None]:
        """Return what the W of this backward is to do; called after each."""
        pending, self._pending = self._pending, []

        def run() -> None:
            for parameters, compute in pending:
                for parameter, gradient in zip(parameters, compute(), strict=True):
                    if parameter.grad is None:
                        parameter.grad = gradient
                    else:
                        parameter.grad += gradient

        return run


class TorchRunner:
    """A schedule of torch.distributed.pipelining.

    Args:
        name: of it.
        num_microbatches: m.
        times: of a full rank.

    Attributes:
        meter: of this rank.
    """

    def __init__(self, name: str, num_microbatches: int, times: Times) -> None:
        self.meter = Meter()
        family, placed = _CLASSES[name]
        placement = placed(dist.get_world_size())
        held = placement.stages(dist.get_rank())
        stages = [self._stage(stage, placement, times) for stage in held]
        single = issubclass(family, torch_schedules.PipelineScheduleSingle)
        self._modules = [stage.submod for stage in stages]
        self._schedule = family(
            stages[0] if single else stages,
            num_microbatches,
            loss_fn=lambda output, _: emulated.loss(output) / num_microbatches,
            scale_grads=False,
        )
        batch = torch.cat(emulated.inputs(num_microbatches))
        self._arguments = [batch] if 0 in held else []
        self._target = torch.zeros_like(batch)  # torch computes no loss without one

    def _stage(self, stage: int, placement: Placement, times: Times) -> PipelineStage:
        store, count = _Deferred(), placement.num_stages
        layers = emulated.stage_layers(stage, placement, times, store, self.meter)
        chunk = EmulatedChunk(layers, stage == 0, stage == count - 1)
        return PipelineStage(chunk, stage, count, torch.device('cpu'), dw_builder=store.dw_builder)

    def gradients(self) -> Iterator[torch.Tensor | None]:
        """Those of this rank's parameters, of the latest iteration."""
        return (parameter.grad for parameter in self.parameters)

    @property
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank, with their gradients."""
        return (parameter for module in self._modules for parameter in module.parameters())

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Without what makes Megatron run on the CPU, which torch needs not."""
        with torch._C.DisableTorchFunction():
            yield

    def iterate(self) -> None:
        """One iteration."""
        for parameter in self.parameters:
            parameter.grad = None
        self._schedule.step(*self._arguments, target=self._target, return_outputs=False)
