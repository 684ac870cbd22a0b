"""Whole models on a GPU: experts, Transformer Engine, context parallelism."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from example import forget_groups
from gpu import marks, needs_te

pytestmark = marks


def train_model(schedule, spec, options, cp):
    """Three iterations of a small GPT over pipeline ranks: losses and gradients of all ranks.

    Args:
        schedule: of ours, or None for Megatron's.
        spec: 'local' or 'te'.
        options: of TransformerConfig.
        cp: context-parallel ranks.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_batch_on_this_cp_rank

    import megatron_zbpp

    if schedule:
        megatron_zbpp.enable(schedule)
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=2, context_parallel_size=cp
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        config = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            autocast_dtype=torch.bfloat16,
            pipeline_model_parallel_size=2,
            context_parallel_size=cp,
            finalize_model_grads_func=finalize_model_grads,
            gradient_accumulation_fusion=False,
            **options,
        )
        experts = options.get('num_moe_experts')
        grouped = options.get('moe_grouped_gemm', False)
        te = 'with_transformer_engine' if spec == 'te' else 'local'
        make = getattr(gpt_layer_specs, f'get_gpt_layer_{te}_spec')
        torch.manual_seed(10 + rank)
        chunk = GPTModel(
            config,
            make(num_experts=experts, moe_grouped_gemm=grouped),
            vocab_size=128,
            max_sequence_length=32,
            pre_process=rank == 0,
            post_process=rank == 1,
            share_embeddings_and_output_weights=False,
        ).cuda()
        model = DDP(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            Float16Module(config, chunk),
        )
        config.no_sync_func = model.no_sync
        losses = []

        def forward_step(data, model):
            batch = get_batch_on_this_cp_rank(dict(next(data)))
            output = model(batch['tokens'], batch['position_ids'], None, labels=batch['labels'])

            def loss_func(values):
                losses.append(values.detach().float().mean().item())
                return values.float().mean(), {}

            return output, loss_func

        for _ in range(3):
            model.zero_grad_buffer()
            generator = torch.Generator().manual_seed(5)
            words = [torch.randint(128, (1, 33), generator=generator).cuda() for _ in range(4)]
            positions = torch.arange(32, device='cuda')[None]
            data = [
                {'tokens': w[:, :-1], 'labels': w[:, 1:], 'position_ids': positions} for w in words
            ]
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(data),
                model=model,
                num_microbatches=4,
                seq_length=32,
                micro_batch_size=1,
            )
            with torch.no_grad():
                for parameter in chunk.parameters():
                    parameter -= 1e-2 * parameter.main_grad.to(parameter.dtype)
        dist.barrier()
        return losses, {name: p.detach().cpu() for name, p in chunk.named_parameters()}
    finally:
        forget_groups()


def check_model(ranks, size, *arguments):
    reference = ranks(size).run(train_model, None, *arguments)
    trained = ranks(size).run(train_model, 'zb-h1', *arguments)
    assert any(losses for losses, _ in reference)
    for (losses, parameters), (own, ours) in zip(reference, trained, strict=True):
        assert losses == own
        assert all(torch.equal(parameters[name], ours[name]) for name in parameters)


MOE = {
    'num_moe_experts': 2,
    'moe_router_topk': 1,
    'moe_router_pre_softmax': True,
    'moe_token_dispatcher_type': 'alltoall',
    'moe_aux_loss_coeff': 1e-2,
    'moe_router_load_balancing_type': 'aux_loss',
    'add_bias_linear': False,
}


@pytest.mark.skipif(
    importlib.util.find_spec('grouped_gemm') is None, reason='needs grouped_gemm: pip install it'
)
def test_grouped_gemm_of_experts(ranks):
    check_model(ranks, 2, 'local', MOE | {'moe_grouped_gemm': True}, 1)


def test_experts_one_by_one(ranks):
    check_model(ranks, 2, 'local', MOE, 1)


@needs_te
@pytest.mark.parametrize('options', [{}, MOE | {'moe_grouped_gemm': True}], ids=['dense', 'MoE'])
def test_te_model(ranks, options):
    check_model(ranks, 2, 'te', options, 1)


@needs_te
def test_te_context_parallelism(ranks):
    check_model(ranks, 4, 'te', {}, 2)
