"""The table of refusals: settings that a schedule does not work with, why, and the cure.

Megatron's arguments and its `TransformerConfig` share these names, so one table serves the command
line, `zbpp doctor` and the first call of a program that has no command line.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import own_offloading
from megatron_zbpp.mcore.refusal import HYBRID, Refusal, captured, hybrid, set_in
from megatron_zbpp.mcore.refusals_of_techniques import (
    ACROSS_REPLICAS,
    FUSED_LOSS,
    OVERLAP,
    UNTIED,
    WITH_SHARDS,
    WITH_SLICES,
    across_replicas,
    with_seeds,
    with_techniques,
)

# setting: (reason, cure); refused where it is set
_WITH_A_SCHEDULE = {
    'num_microbatches_with_partial_activation_checkpoints': (
        'a schedule holds the activations of all microbatches alike',
        'recompute all microbatches alike',
    ),
    'external_cuda_graph': (
        'a captured backward computes weight gradients at once',
        'drop --external-cuda-graph',
    ),
    'use_megatron_fsdp': (
        'it shares all ranks out among data and tensor parallelism, and fails where a pipeline has '
        'some',
        'use --use-distributed-optimizer',
    ),
    'use_torch_fsdp2': (
        'Megatron itself has it without pipelines only',
        'use --use-distributed-optimizer',
    ),
    'hybrid_context_parallel': (
        'its groups differ from microbatch to microbatch',
        'drop --hybrid-context-parallel',
    ),
    'use_transformer_engine_op_fuser': (
        'its fused operations keep weight gradients where no W pass finds them',
        'drop --use-transformer-engine-op-fuser',
    ),
    'moe_paged_stash': (
        "it follows the order of Megatron's own schedules",
        'drop --moe-paged-stash',
    ),
    'cpu_offloading': (
        'Megatron itself has it without pipelines only',
        'drop --cpu-offloading-num-layers for --pipeline-offload',
    ),
    'cpu_offloading_num_layers': (
        'Megatron itself has it without pipelines only',
        'drop --cpu-offloading-num-layers for --pipeline-offload',
    ),
    'use_legacy_models': (
        'legacy models have layers of their own, whose weight gradients cannot wait',
        'drop --use-legacy-models',
    ),
}
# of Transformer Engine from 2.20 on: operands of all experts are one GroupedTensor
_GROUPED = (
    "W passes cannot keep Transformer Engine's GroupedTensor, which has no update_usage to drop "
    'what W does not read'
)
GROUPED_VARIABLE = 'NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM'
# what computes weight gradients within its backward: with W passes
_WITH_W = {
    'overlap_dispatch_backward_with_experts_wgrad': (
        "W passes defer the experts' weight gradients already",
        'drop --overlap-dispatch-backward-with-experts-wgrad',
    ),
    'tp_comm_overlap': (
        'Transformer Engine cannot delay weight gradients with userbuffers',
        'drop --tp-comm-overlap',
    ),
    'enable_cuda_graph': (
        'a captured backward computes weight gradients at once',
        'drop --enable-cuda-graph',
    ),
    'moe_use_grouped_tensor': (_GROUPED, 'drop --moe-use-grouped-tensor'),
    'moe_single_grouped_weight': (_GROUPED, 'drop --moe-single-grouped-weight'),
    'moe_single_grouped_bias': (_GROUPED, 'drop --moe-single-grouped-bias'),
}
# shards of each weight, and of the ranks among which tensor parallelism has them already
_WEIGHT_SHARDS = {
    'tensor_parallel_num_weight_shards': ('tensor_model_parallel_size',),
    'expert_tensor_parallel_num_weight_shards': (
        'expert_tensor_parallel_size',
        'tensor_model_parallel_size',
    ),
}
_SHARDED_WEIGHTS = (
    'weights that are sharded further than tensor parallelism does are gathered in the order of '
    'the first forward, and their gradients reduced one backward later: neither is that of W passes'
)
# what takes for granted in which order chunks run back
_IN_ORDER = {
    own_offloading.SETTING: (
        "it takes backwards to come as in Megatron's own schedules, each forward to run once, and "
        'steps to wait for all ranks',
        'drop --fine-grained-activation-offloading for --pipeline-offload, which any schedule '
        'takes, or take 1f1b, zb-h1, interleaved or zb-interleaved, by itself',
    ),
}
_ONE_LAYER = (
    'this release of Megatron takes a chunk of one layer for finished after its first module: in '
    "the second iteration it ends with 'Chunk mismatch', also by Megatron's own schedules",
    'have two layers or more in each chunk, give one of --offload-modules, or drop '
    '--fine-grained-activation-offloading for --pipeline-offload',
)
# what runs a forward and a backward as one: without such cells
_WITHOUT_CELLS = {
    OVERLAP: (
        'this schedule has no forward that runs as one with a backward',
        'take dualpipe-v, or drop --overlap-moe-expert-parallel-comm',
    ),
}
_FUSED = 'or take a schedule without W passes, such as 1f1b or interleaved'
_GRAPHS = (
    "captured graphs compute weight gradients at once, or in the order of Megatron's own schedules",
    'give --cuda-graph-impl none, or local with a schedule without W passes, such as 1f1b',
)
IN_A_LOOP = (
    'this release of Megatron lays the layers of a hybrid model out in a loop, which this schedule '
    'has not',
    'take a schedule that has, such as zb-h1, or megatron-core from 0.17 on',
)
_TIED_MTP = (
    'with tied embeddings Megatron cannot save the last of several pipeline ranks, which has '
    'two output layers for one',
    'give --untie-embeddings-and-output-weights',
)
_SFT = 'sft'
_UNTOLD = (
    'this release of Megatron tells the first and the last stage alone where packed sequences end: '
    'the layers between would attend from one to the next',
    'have two stages in all, as zb-h1 on 2 ranks has, or take megatron-core from 0.19 on',
)
_MASKS = 'reset_attention_mask'
_UNMASKED = (
    'Megatron gives such masks to the first and the last stage alone, by its 1F1B on more than two '
    'ranks, too: no schedule with several chunks a rank trains the same as that',
    'have two pipeline ranks, take a schedule with one chunk a rank, such as zb-h1, or drop '
    '--reset-attention-mask',
)
_UNMASKED_HYBRID = (
    "this release's script of hybrid models gives such masks to the first and the last stage alone",
    'take a schedule with one chunk a rank, such as zb-h1, or megatron-core from 0.18 on, or drop '
    '--reset-attention-mask',
)
_BUILT_WHOLE = "Megatron's builder of ModelOpt models knows one chunk a rank"
_TAKE_ONE = 'take a schedule with one chunk a rank, such as zb-h1, or drop --'
# what knows one chunk a rank only
_ONE_CHUNK = {
    'modelopt_enabled': (_BUILT_WHOLE, f'{_TAKE_ONE}modelopt-enabled'),
    'export_kd_teacher_load': (_BUILT_WHOLE, f'{_TAKE_ONE}export-kd-teacher-load'),
    'perform_rl_step': (
        "Megatron's train_rl.py scores by the first chunk of each rank, and has no data for others",
        f'{_TAKE_ONE}perform-rl-step',
    ),
}
# refused for some of their values
_BY_VALUE = (
    'cuda_graph_impl',
    'transformer_impl',
    'attention_backend',
    'context_parallel_size',
    'fp8_recipe',
    'mtp_num_layers',
    'position_embedding_type',
    FUSED_LOSS,
    UNTIED,
    *_WEIGHT_SHARDS,
)


def settings() -> tuple[str, ...]:
    """Return all that may be refused."""
    from megatron_zbpp.mcore.refusals_on_cpu import BY_NAME

    tables = (
        *(_WITH_A_SCHEDULE, _IN_ORDER, _WITHOUT_CELLS, _WITH_W, BY_NAME),
        *(WITH_SLICES, WITH_SHARDS, ACROSS_REPLICAS),
    )
    named = (name for table in tables for name in table)
    return tuple(dict.fromkeys((*named, *HYBRID, _SFT, _MASKS, *_ONE_CHUNK, *_BY_VALUE)))


def refused(
    settings: Any,
    on_cpu: bool = False,
    with_te: bool = False,
    placement: Placement | None = None,
    splits: bool = True,
    techniques: Collection[str] = (),
    joins: bool = False,
    in_order: bool = False,
    mirrored: bool = True,
    seeded: bool = False,
) -> Iterator[Refusal]:
    """Return everything in Megatron's arguments or config that is refused.

    Args:
        settings: an object with the settings as attributes; those it lacks are not set.
        on_cpu: also what only a GPU can.
        with_te: on a CPU, Transformer Engine is there, its kernels emulated.
        placement: also what cannot be laid out for it.
        splits: whether the schedule has W passes.
        techniques: names of those that it has.
        joins: whether it can run a forward and a backward as one.
        in_order: whether it runs back as Megatron's own offloading takes for granted.
        mirrored: whether ranks that hold the same stages run them in one order.
        seeded: whether each layer has its own seeds of dropout.
    """
    if not mirrored:
        yield from across_replicas(settings)
    yield from set_in(_WITH_A_SCHEDULE, settings)
    yield from set_in({} if joins else _WITHOUT_CELLS, settings)
    yield from set_in({} if in_order else _IN_ORDER, settings)
    if in_order:
        yield from _with_own_offloading(settings, placement)
    if splits:
        yield from set_in(_WITH_W, settings, _FUSED)
        yield from _in_environment(settings)
        yield from _sharded_weights(settings)
    yield from _captured(settings, splits)
    yield from with_techniques(settings, techniques)
    if seeded:
        yield from with_seeds(settings)
    yield from _unplaced(settings, placement)
    if placement is not None and placement.num_chunks > 1:
        yield from _with_chunks(settings, placement)
    depth = getattr(settings, 'mtp_num_layers', None)
    if depth and not getattr(settings, 'untie_embeddings_and_output_weights', True):
        yield Refusal('mtp_num_layers', depth, *_TIED_MTP)
    if on_cpu:
        from megatron_zbpp.mcore import refusals_on_cpu

        yield from refusals_on_cpu.refused(settings, with_te)


def _with_own_offloading(settings: Any, placement: Placement | None) -> Iterator[Refusal]:
    if own_offloading.forgets(settings, _num_stages(settings, placement)):
        value = getattr(settings, own_offloading.MODULES)
        yield Refusal(own_offloading.MODULES, value, *_ONE_LAYER)


def _captured(settings: Any, splits: bool) -> Iterator[Refusal]:
    """Yield CUDA graphs that hold weight gradients, or more than one pass."""
    graphs = captured(settings)
    if graphs and (splits or graphs != 'local' or _whole_iteration(settings)):
        yield Refusal('cuda_graph_impl', graphs, *_GRAPHS)


def _unplaced(settings: Any, placement: Placement | None) -> Iterator[Refusal]:
    """Yield models whose layers or batches this release does not bring to the stages."""
    pattern = hybrid(settings)
    loop = placement is None or placement.is_loop
    if pattern is not None and not loop and not _can_place_hybrid():
        yield Refusal(pattern, getattr(settings, pattern), *IN_A_LOOP)
    if getattr(settings, _SFT, False) and _num_stages(settings, placement) > 2:
        yield from _packed(settings)


def _num_stages(settings: Any, placement: Placement | None) -> int:
    if placement is not None:
        return placement.num_stages
    chunks = getattr(settings, 'virtual_pipeline_model_parallel_size', None) or 1
    return getattr(settings, 'pipeline_model_parallel_size', 1) * chunks


def _in_environment(settings: Any) -> Iterator[Refusal]:
    value = os.environ.get(GROUPED_VARIABLE, '0')
    decided = getattr(settings, 'moe_use_grouped_tensor', None) is not None
    if getattr(settings, 'moe_grouped_gemm', False) and not decided and value.strip('0 '):
        yield Refusal(GROUPED_VARIABLE, value, _GROUPED, f'unset it, {_FUSED}')


def _sharded_weights(settings: Any) -> Iterator[Refusal]:
    """Yield generalized tensor parallelism: more shards of a weight than tensor-parallel ranks."""
    for setting, sizes in _WEIGHT_SHARDS.items():
        ranks = next((size for name in sizes if (size := getattr(settings, name, None))), 1)
        shards = getattr(settings, setting, None)
        if shards and int(shards) > ranks:
            cure = f'drop --{setting.replace("_", "-")}'
            yield Refusal(setting, shards, _SHARDED_WEIGHTS, f'{cure}, {_FUSED}')


def needs_masks(settings: Any) -> bool:
    """Return whether batches of NVIDIA's loop have masks that differ from the plain causal one.

    Args:
        settings: Megatron's arguments; None: another loop trains.
    """
    made = getattr(settings, 'create_attention_mask_in_dataloader', True)
    return bool(made and getattr(settings, _MASKS, False))


def _with_chunks(settings: Any, placement: Placement) -> Iterator[Refusal]:
    if needs_masks(settings) and placement.num_ranks > 2:
        yield Refusal(_MASKS, True, *_UNMASKED)
    elif needs_masks(settings) and hybrid(settings) is not None and not _scripts_share_batches():
        yield Refusal(_MASKS, True, *_UNMASKED_HYBRID)
    yield from set_in(_ONE_CHUNK, settings)


def _packed(settings: Any) -> Iterator[Refusal]:
    """Yield that stages between the first and the last take packed sequences for one."""
    from megatron_zbpp.mcore import compat  # imports Megatron, which has not been until here

    if not compat.tells_all_stages_of_sequences():
        yield Refusal(_SFT, True, *_UNTOLD)


def _scripts_share_batches() -> bool:
    from megatron_zbpp.mcore import compat  # imports Megatron, which has not been until here

    return compat.get_batch_module().startswith('megatron.core')


def _can_place_hybrid() -> bool:
    from megatron_zbpp.mcore import compat  # imports Megatron, which has not been until here

    return compat.segments_module() is not None


def _whole_iteration(settings: Any) -> bool:
    scope = getattr(settings, 'cuda_graph_scope', None) or ()
    scopes = [scope] if isinstance(scope, str) else scope
    return any(getattr(each, 'name', each) == 'full_iteration' for each in scopes)
