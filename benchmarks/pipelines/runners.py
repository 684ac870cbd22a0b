"""Megatron-Core's own schedules and ours on one model: one loop, Megatron's own.

Importing this imports Megatron: `megatron_zbpp.emulation.cpu.install()` comes before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

import megatron_zbpp
from benchmarks.pipelines import emulated
from benchmarks.pipelines.emulated import LAYERS, SHAPE, EmulatedChunk, Meter, Store, Times
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.mcore.lowered import for_megatron
from megatron_zbpp.mcore.techniques import sliced_layers
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.techniques.updates.versions import updates_of

_CHUNK = f'{emulated.__name__}:EmulatedChunk'  # of which slices are cut, as of a GPTModel


class Model(Protocol):
    """What is trained.

    Attributes:
        sequence, micro_batch: the shape of a microbatch.
    """

    sequence: int
    micro_batch: int

    def chunks(self, placement: Placement, store: WeightGradStore) -> list[torch.nn.Module]:
        """Those of this rank, each with Megatron's config as `.config`."""

    def data(self, num_microbatches: int) -> Iterator[Any]:
        """Return microbatches without end; each iteration gets the same."""

    def forward_step(self, data: Iterator[Any], model: torch.nn.Module) -> tuple:
        """Return what Megatron calls for each microbatch on each chunk."""

    def ready(self) -> AbstractContextManager[None]:
        """Around iterations."""


class EmulatedModel:
    """The one of `emulated`, for Megatron's loop.

    Args:
        times: of a full rank.

    Attributes:
        meter: of this rank.
    """

    sequence, micro_batch = SHAPE[:2]

    def __init__(self, times: Times) -> None:
        self.meter = Meter()
        self._times = times

    def chunks(self, placement: Placement, store: Store) -> list[EmulatedChunk]:
        stages = placement.stages(dist.get_rank())
        config = self.config(placement.num_ranks, len(stages))
        found = []
        for stage in stages:
            layers = emulated.stage_layers(stage, placement, self._times, store, self.meter)
            last = stage == placement.num_stages - 1
            found.append(EmulatedChunk(layers, stage == 0, last, config))
            found[-1].model_type = ModelType.encoder_or_decoder
        return found

    def config(self, num_ranks: int, num_chunks: int) -> TransformerConfig:
        """Return Megatron's."""
        return _config(num_ranks, num_chunks)

    def data(self, num_microbatches: int) -> Iterator[torch.Tensor]:
        drawn = emulated.inputs(num_microbatches)
        return itertools.cycle([x.transpose(0, 1) for x in drawn])  # as slices are cut

    def forward_step(self, data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple:
        return model(next(data)), _loss

    @contextmanager
    def ready(self) -> Iterator[None]:
        with mock.patch.object(sliced_layers, '_models', lambda: (_CHUNK,)), _without_shim():
            yield


class MegatronRunner:
    """Megatron-Core's 1F1B or interleaved schedule.

    Args:
        schedule: the same, as ours: what is where, and how many microbatches.
        model: to train.
        optimizer: whether to train: DistributedDataParallel, Megatron's Adam in fp32, clipping.

    Attributes:
        reported: what the loss function told of each microbatch of the latest iteration, on the
            rank that has the loss.
    """

    reported: list[dict[str, torch.Tensor]]
    _groups: Mapping[str, Any] = MappingProxyType({})  # other than Megatron's own

    def __init__(self, schedule: Schedule, model: Model, optimizer: bool) -> None:
        self._model = model
        self._build(schedule.placement, schedule.num_microbatches, WeightGradStore())
        self._optimizer = self._train() if optimizer else None

    @property
    def meter(self) -> Meter:
        """Of an emulated model."""
        return self._model.meter

    def _build(self, placement: Placement, m: int, store: WeightGradStore) -> None:
        """Build this rank's chunks of the model."""
        self._models = self._model.chunks(placement, store)
        self._config = self._models[0].config
        self._num_microbatches = m
        self._inputs = [self._model.data(m) for _ in self._models]
        many = len(self._models) > 1
        self._sizes = placement.num_ranks, len(self._models) if many else None

    def _train(self) -> Any:
        """Wrap the model as a training script does; its optimizer."""
        config = self._config
        self._models = [DDP(config, DistributedDataParallelConfig(), m) for m in self._models]
        no_syncs = [model.no_sync for model in self._models]
        config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        config.finalize_model_grads_func = finalize_model_grads
        # so high that the norm is computed and never exceeds it: gradients stay for the checksum,
        # as do weights, of which asynchronous schedules use older ones
        settings = OptimizerConfig(optimizer='adam', lr=0.0, clip_grad=1e9)
        optimizer = get_megatron_optimizer(settings, self._models)
        config.grad_scale_func = optimizer.scale_loss
        return optimizer

    @property
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank; `.main_grad`, or else `.grad`, is their gradient."""
        return (parameter for model in self._models for parameter in model.parameters())

    def gradients(self) -> Iterator[torch.Tensor]:
        """Those of this rank's parameters, of the latest iteration."""
        return (getattr(p, 'main_grad', p.grad) for p in self.parameters)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Around iterations: everything is in place for them."""
        with self._model.ready():
            yield

    def iterate(self) -> None:
        """One iteration, as in a training loop."""
        if self._optimizer is None:
            for parameter in self.parameters:
                parameter.grad = None
            self._forward_backward()
            return
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._forward_backward()
        self._optimizer.step()

    def _forward_backward(self) -> None:
        pp_size, vp_size = self._sizes
        many = vp_size is not None
        self.reported = get_forward_backward_func(pp_size, vp_size)(
            forward_step_func=self._model.forward_step,
            data_iterator=self._inputs if many else self._inputs[0],
            model=self._models if many else self._models[0],
            num_microbatches=self._num_microbatches,
            seq_length=self._model.sequence,
            micro_batch_size=self._model.micro_batch,
            **self._groups,
        )


class ZbppRunner(MegatronRunner):
    """A schedule of ours: Megatron's functions while the plugin is enabled.

    Args:
        schedule: any.
        source: what `megatron_zbpp.enable` is given to run it: its family's name, or itself.
        model: to train.
        optimizer: see `MegatronRunner`.
        early: whether its steps do not wait for all ranks.
        waits: whether steps of an asynchronous schedule do.

    Attributes:
        plugin: that runs it.
    """

    def __init__(
        self,
        schedule: Schedule,
        source: str | Schedule,
        model: Model,
        optimizer: bool,
        early: bool = False,
        waits: bool = False,
    ) -> None:
        self._model = model
        with model.ready():
            clip = 'global' if waits else None
            self.plugin = megatron_zbpp.enable(
                source, post_validation=early and 1, anneal_steps=0, clip=clip
            )
        placement, updates = for_megatron(schedule).placement, updates_of(schedule.graph)
        m = schedule.num_microbatches if updates is None else updates.every  # of one of its calls
        self._build(placement, m, self.plugin.session.store)
        self._optimizer = self._train() if optimizer else None
        self.plugin.disable()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Enable the plugin, once and for all its iterations: it keeps what it has lowered."""
        with super().ready():
            self.plugin.install()
            try:
                yield
            finally:
                self.plugin.disable()


class TwoWayRunner(ZbppRunner):
    """A two-way schedule of ours, on pairs of replicas of half as many ranks."""

    def __init__(self, schedule: Schedule, source: str | Schedule, model: Model) -> None:
        super().__init__(schedule, source, model, optimizer=False)
        rank, half = dist.get_rank(), dist.get_world_size() // 2
        placement = self.plugin.session.programs.whole_placement(half)
        self._build(placement, schedule.num_microbatches // 2, self.plugin.session.store)
        self._sizes = half, len(self._models)
        ways = [
            placement.routes[1][s] == dist.get_rank() for s in placement.stages(dist.get_rank())
        ]
        data = [model.data(schedule.num_microbatches) for _ in ways]
        self._inputs = [
            itertools.islice(each, up, None, 2) for each, up in zip(data, ways, strict=True)
        ]
        for face in self.plugin.session.faces:  # whose data a chunk reads is known here
            face.data_parallel_rank(0)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        pipelines = [dist.new_group(list(range(each, 2 * half, 2))) for each in range(2)]
        pairs = [dist.new_group([2 * k, 2 * k + 1]) for k in range(half)]
        groups.pp, self._pair = pipelines[rank % 2], pairs[rank // 2]
        groups.dp = self._pair
        self._groups = {'pg_collection': groups, 'p2p_communicator': ()}

    def gradients(self) -> Iterator[torch.Tensor]:
        """Those of the pair in the mean; both have them: each counts half of their squares."""
        for gradient in super().gradients():
            mean = gradient.clone()
            dist.all_reduce(mean, group=self._pair)
            yield mean / 2 / 2**0.5


@contextmanager
def _without_shim() -> Iterator[None]:
    """Do what `cpu.install` does for Megatron's loop, cheaper: it sees to every single torch call.

    A GPU would not take that time. What the loop needs of it are tensors on the CPU.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        for name in ('empty', 'ones', 'tensor', 'zeros'):
            stack.enter_context(mock.patch.object(torch, name, _on_cpu(getattr(torch, name))))
        yield


def _on_cpu(factory: Callable) -> Callable:
    return lambda *args, device=None, **options: factory(*args, **options)


def _config(num_ranks: int, num_chunks: int) -> TransformerConfig:
    """As Megatron's training script sets it up."""
    interleaved = num_chunks > 1
    return TransformerConfig(
        num_layers=LAYERS * num_ranks,
        hidden_size=SHAPE[-1],
        num_attention_heads=1,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=num_chunks if interleaved else None,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
    )


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron divides the first by the number of microbatches."""
    loss = emulated.loss(output)
    return loss, {'loss': loss.detach().clone()}
