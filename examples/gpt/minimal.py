"""Trains a small GPT by a zero-bubble schedule: model, data, `enable`, train.

    torchrun --nproc-per-node 4 examples/gpt/minimal.py

It learns the bytes of its own source, on GPUs or the CPU. `pretrain_gpt.py` beside it has what a
training needs: checkpoints, evaluation, mixed precision, logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_zbpp

DEVICE = megatron_zbpp.device()  # before megatron.core is imported

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

SCHEDULE, REPLICAS = 'zb-v', 1  # dualpipe and other two-way ones take an even number of them
LAYERS, SEQUENCE, MICRO_BATCH, MICROBATCHES, ITERATIONS = 8, 64, 2, 8, 10
TEXT = torch.tensor(list(Path(__file__).read_bytes()))


def build_model(layout: megatron_zbpp.ModelLayout) -> list[DDP]:
    """Return this rank's chunks of the model: with zb-v, the ends of a Λ over the ranks."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=dist.get_world_size() // REPLICAS,
        pipeline_model_parallel_layout=layout.text,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    chunks = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=256,
            max_sequence_length=SEQUENCE,
            pre_process=layout.is_first(stage),
            post_process=layout.is_last(stage),
            share_embeddings_and_output_weights=False,
            vp_stage=chunk if layout.num_chunks > 1 else None,
        )
        for chunk, stage in enumerate(layout.stages(dist.get_rank() // REPLICAS))
    ]
    return [DDP(config, DistributedDataParallelConfig(), chunk.to(DEVICE)) for chunk in chunks]


def batches(replica: int) -> Iterator[torch.Tensor]:
    """Yield microbatches of bytes, each sequence one byte longer than the model reads."""
    draw = torch.Generator().manual_seed(replica)  # the first and the last stage read the same
    while True:
        starts = torch.randint(len(TEXT) - SEQUENCE, (MICRO_BATCH,), generator=draw).tolist()
        yield torch.stack([TEXT[start : start + SEQUENCE + 1] for start in starts]).to(DEVICE)


def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean loss of a microbatch, and what of it is reported."""
    loss = losses.float().mean()
    return loss, {'loss': loss.detach().clone()}  # Megatron scales the first in place


def forward_step(data: Iterator[torch.Tensor], model: DDP) -> tuple[torch.Tensor, partial]:
    """Run one chunk on one microbatch, for Megatron."""
    text = next(data)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(MICRO_BATCH, -1)
    return model(text[:, :-1], positions, None, labels=text[:, 1:]), loss_func


def main() -> None:
    """Trains, and prints the loss and the bubble of each iteration."""
    dist.init_process_group('nccl' if DEVICE.type == 'cuda' else 'gloo')
    if DEVICE.type == 'cuda':
        torch.cuda.set_device(DEVICE)
    megatron_zbpp.enable(SCHEDULE)
    ranks = dist.get_world_size() // REPLICAS
    layout = megatron_zbpp.layout_for(SCHEDULE, ranks, LAYERS)
    chunks = layout.num_chunks if layout.num_chunks > 1 else None
    parallel_state.initialize_model_parallel(1, ranks, chunks)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    models = build_model(layout)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer='adam', lr=1e-3), models)
    data = [batches(megatron_zbpp.data_parallel_rank(chunk)) for chunk in range(len(models))]
    for iteration in range(ITERATIONS):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
        )
        optimizer.step()
        figures = megatron_zbpp.figures()
        if results:  # where the last stage is
            loss = torch.stack([result['loss'] for result in results]).mean()
            print(f'iteration {iteration + 1} | loss {loss:.4f} | {figures}', flush=True)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
