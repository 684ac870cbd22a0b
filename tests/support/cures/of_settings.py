"""Rows of Megatron's settings that are refused with others, or by some schedules.

`test_refusals.py` has each setting by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

from cures.asking import refusal
from cures.row import row
from megatron_zbpp.ir import Placement

VEE, LOOP = {'placement': Placement.v(4)}, {'placement': Placement.loop(4)}
CPU = {'on_cpu': True}
EMULATED = {'on_cpu': True, 'with_te': True}
EXPERTS = {'overlap_moe_expert_parallel_comm': True}
RECOMPUTED = {'techniques': {'recompute'}}
VERSIONS = {'techniques': {'updating'}}
NO_W = {'splits': False}
SEEDED = {'seeded': True, 'joins': True, 'splits': False}
SHARDED = {'techniques': {'split_vocabulary'}, 'splits': False}
BOTH_SHARDED = {'techniques': {'split_vocabulary', 'split_embedding'}, 'splits': False}
FUSED = {'cross_entropy_loss_fusion': True}
SLICED = {'techniques': {'sliced'}, 'joins': True, 'splits': False}
DELAYED = {'fp8': 'hybrid', 'fp8_recipe': 'delayed'}
MASKS = {'reset_attention_mask': True}
PATTERN = {'hybrid_layer_pattern': 'M*|M*|M*|M*'}


def grouped(value: str, how: dict) -> Callable:
    """With Transformer Engine's variable in the environment."""

    def run() -> None:
        with mock.patch.dict(os.environ, {'NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM': value}):
            refusal(how, moe_grouped_gemm=True)()

    return run


def lacks_segments() -> bool:
    from megatron_zbpp.mcore import compat

    return compat.segments_module() is None


def lacks_sequences() -> bool:
    from megatron_zbpp.mcore import compat

    return not compat.tells_all_stages_of_sequences()


def reads_batches_apart() -> bool:
    from megatron_zbpp.mcore import compat

    return not compat.get_batch_module().startswith('megatron.core')


def forgets_modules() -> bool:
    from megatron_zbpp.mcore import compat

    return compat.forgets_modules_that_stay()


def offloading(layers: int, *modules: str, on: bool = True) -> Callable:
    return refusal(
        LOOP | {'in_order': True},
        fine_grained_activation_offloading=on,
        offload_modules=modules,
        num_layers=layers,
    )


REFUSALS = {
    'seeds of dropout and layers in parts': row(
        refusal(SEEDED, overlap_moe_expert_parallel_comm=True),
        'drop --overlap-moe-expert-parallel-comm, or leave out --pipeline-dropout-seeds',
        refusal(SEEDED),
        refusal({'joins': True}, overlap_moe_expert_parallel_comm=True),
    ),
    'seeds of dropout and graphs': row(
        refusal(SEEDED, cuda_graph_impl='local'),
        'give --cuda-graph-impl none, or leave out --pipeline-dropout-seeds',
        refusal(SEEDED, cuda_graph_impl='none'),
        refusal(NO_W, cuda_graph_impl='local'),
    ),
    'versions of weights and a setting': row(
        refusal(VERSIONS, mtp_num_layers=1),
        'drop --mtp-num-layers, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS),
        refusal({}, mtp_num_layers=1),
    ),
    'versions of weights and a bias of experts': row(
        refusal(VERSIONS, moe_router_enable_expert_bias=True),
        'drop --moe-router-enable-expert-bias, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS),
        refusal({}, moe_router_enable_expert_bias=True),
    ),
    'versions of weights and counts of a global batch': row(
        refusal(VERSIONS, moe_router_load_balancing_type='global_aux_loss'),
        'give --moe-router-load-balancing-type aux_loss, or take a synchronous schedule, such as '
        'zb-v',
        refusal(VERSIONS, moe_router_load_balancing_type='aux_loss'),
        refusal({}, moe_router_load_balancing_type='global_aux_loss'),
    ),
    'versions of weights and context parallelism': row(
        refusal(VERSIONS, context_parallel_size=2),
        'give 1, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS, context_parallel_size=1),
        refusal({}, context_parallel_size=2),
    ),
    'versions of weights and iterations that run again': row(
        refusal(VERSIONS, rerun_mode='validate_results'),
        'give --rerun-mode disabled, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS, rerun_mode='disabled'),
        refusal({}, rerun_mode='validate_results'),
    ),
    'versions of weights and graphs': row(
        refusal(VERSIONS | NO_W, cuda_graph_impl='local'),
        'give --cuda-graph-impl none, or take a synchronous schedule, such as zb-v',
        refusal(VERSIONS | NO_W, cuda_graph_impl='none'),
    ),
    'replicas that would wait amid passes': row(
        refusal({'mirrored': False}, overlap_grad_reduce=True),
        'drop --overlap-grad-reduce, or take chimera',
        refusal({'mirrored': False}),
        refusal({}, overlap_grad_reduce=True),
    ),
    'replicas that would gather amid passes': row(
        refusal({'mirrored': False}, overlap_param_gather=True),
        'drop --overlap-param-gather, or take chimera',
        refusal({}, overlap_param_gather=True),
    ),
    'replicas that share experts amid passes': row(
        refusal({'mirrored': False}, expert_model_parallel_size=2),
        'give 1, or take chimera',
        refusal({'mirrored': False}, expert_model_parallel_size=1),
        refusal({}, expert_model_parallel_size=2),
    ),
    'replicas that balance experts amid passes': row(
        refusal({'mirrored': False}, moe_router_load_balancing_type=['global_aux_loss']),
        'give --moe-router-load-balancing-type aux_loss, or take chimera',
        refusal({'mirrored': False}, moe_router_load_balancing_type='aux_loss'),
        refusal({}, moe_router_load_balancing_type=['global_aux_loss']),
    ),
    'graphs': row(
        refusal({}, cuda_graph_impl='local'),
        'give --cuda-graph-impl none, or local with a schedule without W passes, such as 1f1b',
        refusal({}, cuda_graph_impl='none'),
        refusal(NO_W, cuda_graph_impl='local'),
    ),
    'graphs and recompute passes': row(
        refusal(RECOMPUTED | NO_W, cuda_graph_impl='local'),
        'give --cuda-graph-impl none',
        refusal(RECOMPUTED | NO_W, cuda_graph_impl='none'),
    ),
    'delayed scaling and recompute passes': row(
        refusal(RECOMPUTED, **DELAYED),
        'give --fp8-recipe tensorwise',
        refusal(RECOMPUTED, **DELAYED | {'fp8_recipe': 'tensorwise'}),
    ),
    'pairs and recompute passes': row(
        refusal(RECOMPUTED | {'joins': True}, **EXPERTS),
        'drop --overlap-moe-expert-parallel-comm, or take a schedule without recompute',
        refusal(RECOMPUTED | {'joins': True}),
        refusal({'joins': True}, **EXPERTS),
    ),
    **{
        f'slices and {name}': row(
            refusal(SLICED, **given),
            f'{cure}, or take a schedule of whole sequences',
            refusal(SLICED, **cured),
        )
        for name, given, cured, cure in (
            ('experts', EXPERTS | {}, {}, 'drop --overlap-moe-expert-parallel-comm'),
            ('context parallelism', {'context_parallel_size': 2}, {}, 'give 1'),
            (
                'hybrid models',
                {'hybrid_layer_pattern': 'M*'},
                {},
                'have attention, MLP and experts alone (*, -, E), from 0.18 on',
            ),
            (
                'graphs',
                {'cuda_graph_impl': 'local'},
                {'cuda_graph_impl': 'none'},
                'give --cuda-graph-impl none',
            ),
            (
                'delayed scaling',
                DELAYED,
                DELAYED | {'fp8_recipe': 'tensorwise'},
                'give --fp8-recipe tensorwise',
            ),
        )
    },
    'scaled logits': row(
        refusal(SHARDED, use_mup=True),
        'drop --use-mup, or leave out --pipeline-vocab-parallel',
        refusal(SHARDED),
        refusal(NO_W, use_mup=True),
    ),
    'a fused loss': row(
        refusal(SHARDED, **FUSED, cross_entropy_fusion_impl='te'),
        'give --cross-entropy-fusion-impl native, or leave out --pipeline-vocab-parallel',
        refusal(SHARDED, **FUSED, cross_entropy_fusion_impl='native'),
        refusal(NO_W, **FUSED, cross_entropy_fusion_impl='te'),
    ),
    'a tied output layer': row(
        refusal(SHARDED, untie_embeddings_and_output_weights=False),
        'give --pipeline-vocab-parallel input+output, or --untie-embeddings-and-output-weights, or '
        'leave out --pipeline-vocab-parallel',
        refusal(SHARDED, untie_embeddings_and_output_weights=True),
        refusal(BOTH_SHARDED, untie_embeddings_and_output_weights=False),
    ),
    'the output layer on all ranks and graphs': row(
        refusal(SHARDED, cuda_graph_impl='local'),
        'give --cuda-graph-impl none',
        refusal(SHARDED, cuda_graph_impl='none'),
    ),
    'slices and fused positions': row(
        refusal(SLICED, multi_latent_attention=True, apply_rope_fusion=True),
        'give --no-rope-fusion',
        refusal(SLICED, multi_latent_attention=True, apply_rope_fusion=False),
        refusal(SLICED, multi_latent_attention=False, apply_rope_fusion=True),
    ),
    'slices and square masks': row(
        refusal(SLICED, transformer_impl='local', masked_softmax_fusion=True),
        'give --no-masked-softmax-fusion',
        refusal(SLICED, transformer_impl='local', masked_softmax_fusion=False),
    ),
    'tied embeddings': row(
        refusal({}, mtp_num_layers=1, untie_embeddings_and_output_weights=False),
        'give --untie-embeddings-and-output-weights',
        refusal({}, mtp_num_layers=1, untie_embeddings_and_output_weights=True),
    ),
    'grouped tensors': row(
        grouped('1', {}),
        'unset it, or take a schedule without W passes, such as 1f1b or interleaved',
        grouped('0', {}),
        grouped('1', NO_W),
    ),
    'sharded weights': row(
        refusal({}, tensor_parallel_num_weight_shards=2),
        'drop --tensor-parallel-num-weight-shards, or take a schedule without W passes',
        refusal({}),
        refusal(NO_W, tensor_parallel_num_weight_shards=2),
    ),
    'masks': row(
        refusal(VEE, **MASKS),
        'have two pipeline ranks, take a schedule with one chunk a rank, such as zb-h1, or drop '
        '--reset-attention-mask',
        refusal({'placement': Placement.v(2)}, **MASKS),
        refusal(LOOP, **MASKS),
        refusal(VEE),
    ),
    'masks of hybrid models': row(
        refusal({'placement': Placement.loop(2, 2)}, **MASKS, **PATTERN),
        'take a schedule with one chunk a rank, such as zb-h1, or megatron-core from 0.18 on, or '
        'drop --reset-attention-mask',
        refusal({'placement': Placement.loop(2)}, **MASKS, **PATTERN),
        refusal({'placement': Placement.loop(2, 2)}, **PATTERN),
        refuses=reads_batches_apart,
    ),
    'hybrid models': row(
        refusal(VEE, **PATTERN),
        'take a schedule that has, such as zb-h1, or megatron-core from 0.17 on',
        refusal(LOOP, **PATTERN),
        refuses=lacks_segments,
    ),
    'packed sequences': row(
        refusal(VEE, sft=True),
        'have two stages in all, as zb-h1 on 2 ranks has, or take megatron-core from 0.19 on',
        refusal({'placement': Placement.loop(2)}, sft=True),
        refuses=lacks_sequences,
    ),
    'ModelOpt': row(
        refusal(VEE, modelopt_enabled=True),
        'take a schedule with one chunk a rank, such as zb-h1, or drop --modelopt-enabled',
        refusal(LOOP, modelopt_enabled=True),
        refusal(VEE),
    ),
    'reinforcement learning in several chunks': row(
        refusal(VEE, perform_rl_step=True),
        'take a schedule with one chunk a rank, such as zb-h1, or drop --perform-rl-step',
        refusal(LOOP, perform_rl_step=True),
        refusal(VEE, perform_rl_step=False),
    ),
    "Megatron's offloading, of one layer": row(
        offloading(4, 'core_attn', 'attn_proj'),
        'have two layers or more in each chunk, give one of --offload-modules, or drop '
        '--fine-grained-activation-offloading',
        offloading(8, 'core_attn', 'attn_proj'),
        offloading(4, 'core_attn'),
        offloading(4, 'core_attn', 'attn_proj', on=False),
        refuses=forgets_modules,
    ),
    'layers on a CPU': row(
        refusal(CPU, transformer_impl='inference_optimized'),
        'give --transformer-impl local',
        refusal(CPU, transformer_impl='local'),
    ),
    **{
        f'{kind} on a CPU': row(
            refusal(CPU, **{name: given}),
            'have a pattern of other layers (*, -, E, +)',
            refusal(CPU, hybrid_layer_pattern='*-|*E/*-'),
            refusal({}, **{name: given}),
        )
        for kind, name, given in (
            ('Mamba', 'hybrid_layer_pattern', '*M|*-'),
            ('Mamba by a ratio', 'hybrid_attention_ratio', 0.5),
            ('Gated DeltaNet', 'hybrid_layer_pattern', '*-|*G'),
            ('sparse attention', 'hybrid_layer_pattern', '*-|*-/D-'),
        )
    },
    'scaling on a CPU': row(
        refusal(EMULATED, fp8='hybrid', fp8_recipe='mxfp8'),
        'give --fp8-recipe tensorwise',
        refusal(EMULATED, fp8='hybrid', fp8_recipe='tensorwise'),
    ),
    'attention on a CPU': row(
        refusal(CPU, attention_backend='flash'),
        'give --attention-backend auto',
        refusal(CPU, attention_backend='auto'),
    ),
    'sequences on a CPU': row(
        refusal(CPU, context_parallel_size=2),
        'give --context-parallel-size 1, or --spec with an attention that can',
        refusal(CPU, context_parallel_size=1),
        refusal(CPU, context_parallel_size=2, spec=['own', 'attention']),
    ),
}
