"""A GPT of Megatron-Core for the benchmark: groups, chunks, optimizer, data. No line is ours alone.

Importing this imports Megatron: `device.find()` comes before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from benchmarks.gpt.device import Gpu, Host
from benchmarks.gpt.jobs import Job
from benchmarks.gpt.models import Model
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.placement import layers_per_stage, layout_string

_SEED = 1234


def join(job: Job, device: Gpu | Host) -> None:
    """Make process groups and random seeds."""
    if not dist.is_initialized():
        dist.init_process_group(device.backend)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.t,
        pipeline_model_parallel_size=job.p,
        virtual_pipeline_model_parallel_size=job.chunks if job.chunks > 1 else None,
    )
    torch.manual_seed(_SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(_SEED)


def layers_of(spec: str) -> str:
    """Whose layers `spec` means here: Transformer Engine's where it is, if that is left open."""
    if spec != 'auto':
        return spec
    return 'te' if find_spec('transformer_engine') else 'local'


def config(job: Job, model: Model, layers: list[int]) -> TransformerConfig:
    """Megatron's, for stages of so many layers each."""
    return TransformerConfig(
        num_layers=sum(layers),
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        tensor_model_parallel_size=job.t,
        pipeline_model_parallel_size=job.p,
        sequence_parallel=job.t > 1,
        pipeline_model_parallel_layout=layout_string(layers) if job.p > 1 else None,
        deallocate_pipeline_outputs=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        # the kernel is of apex
        gradient_accumulation_fusion=find_spec('fused_weight_gradient_mlp_cuda') is not None,
        finalize_model_grads_func=finalize_model_grads,
    )


def chunk(
    job: Job, model: Model, settings: TransformerConfig, first: bool, last: bool, vp: int | None
) -> GPTModel:
    """One stage, with the embedding if it is the `first`, the output layer if the `last`."""
    te = layers_of(job.spec) == 'te'
    spec = get_gpt_layer_with_transformer_engine_spec() if te else get_gpt_layer_local_spec()
    return GPTModel(
        settings,
        spec,
        vocab_size=model.vocabulary(job.t),
        max_sequence_length=model.sequence,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=True,
        position_embedding_type='learned_absolute',
        vp_stage=vp,
    )


def chunks(job: Job, model: Model, placement: Placement) -> tuple[TransformerConfig, list]:
    """Return this rank's chunks of the model, before they are wrapped.

    Raises:
        ValueError: too few layers for so many stages.
    """
    counts = layers_per_stage(model.layers, placement, embedding=model.ends, loss=model.ends)
    settings = config(job, model, counts)
    held = placement.stages(parallel_state.get_pipeline_model_parallel_rank())
    last = placement.num_stages - 1
    return settings, [
        chunk(job, model, settings, stage == 0, stage == last, vp if len(held) > 1 else None)
        for vp, stage in enumerate(held)
    ]


def wrap(settings: TransformerConfig, found: Sequence[GPTModel], device: Gpu | Host) -> list[DDP]:
    """As a training script does: bf16, with gradients in fp32, sharded over replicas."""
    shards = parallel_state.get_data_parallel_world_size() > 1
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=shards, use_distributed_optimizer=shards
    )
    models = [
        DDP(settings, reduction, Float16Module(settings, each.to(device.torch))) for each in found
    ]
    no_syncs = [model.no_sync for model in models]
    settings.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    return models


def optimizer(models: list[DDP]) -> Any:
    """Megatron's Adam, with clipping."""
    settings = OptimizerConfig(
        optimizer='adam',
        lr=1e-4,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=parallel_state.get_data_parallel_world_size() > 1,
    )
    made = get_megatron_optimizer(settings, models)
    models[0].config.grad_scale_func = made.scale_loss
    return made


def batches(job: Job, model: Model, device: Gpu | Host) -> Iterator[dict[str, torch.Tensor]]:
    """One microbatch of random words for ever: what data costs is not measured."""
    generator = torch.Generator().manual_seed(_SEED)
    shape = job.micro_batch, model.sequence + 1
    words = torch.randint(model.words, shape, generator=generator).to(device.torch)
    positions = torch.arange(model.sequence, device=device.torch).expand(job.micro_batch, -1)
    return itertools.repeat(
        {'tokens': words[:, :-1], 'labels': words[:, 1:], 'positions': positions}
    )


def forward_step(data: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
    """Megatron calls this for each microbatch on each chunk."""
    batch = next(data)
    return model(batch['tokens'], batch['positions'], None, labels=batch['labels']), loss_func


def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean, and itself for the log."""
    loss = losses.float().mean()
    return loss, {'lm loss': loss.detach().clone()}  # Megatron divides `loss` in place
