"""Settings of Megatron's that are refused, with values that are, and what their cures do."""

from __future__ import annotations

import re
from types import SimpleNamespace

from megatron_zbpp.mcore import refusals

# settings and flags of some releases only: of which
OF_SOME = {
    'use_legacy_models': 'until 0.17',
    '--use-legacy-models': 'until 0.17',
    'overlap_dispatch_backward_with_experts_wgrad': 'from 0.18',
    '--overlap-dispatch-backward-with-experts-wgrad': 'from 0.18',
    'logits_load_dir': 'from 0.19',
    'moe_paged_stash': 'from 0.19',
    'moe_expert_rank_capacity_factor': 'from 0.19',
    '--moe-paged-stash': 'from 0.19',
    'use_transformer_engine_op_fuser': 'from 0.17',
    '--use-transformer-engine-op-fuser': 'from 0.17',
    'tensor_parallel_num_weight_shards': 'from 0.19',
    '--tensor-parallel-num-weight-shards': 'from 0.19',
    'expert_tensor_parallel_num_weight_shards': 'from 0.19',
    '--expert-tensor-parallel-num-weight-shards': 'from 0.19',
    'moe_single_grouped_weight': 'from 0.18',
    '--moe-single-grouped-weight': 'from 0.18',
    'moe_single_grouped_bias': 'from 0.18',
    '--moe-single-grouped-bias': 'from 0.18',
    'moe_use_grouped_tensor': 'from 0.20',
    '--moe-use-grouped-tensor': 'from 0.20',
    'hybrid_layer_pattern': 'from 0.17',
    'hybrid_attention_ratio': 'until 0.16',
    'hybrid_mlp_ratio': 'until 0.16',
    'modelopt_enabled': 'scripts add it',
    '--modelopt-enabled': 'scripts add it',
    'export_kd_teacher_load': 'scripts add it',
    '--export-kd-teacher-load': 'scripts add it',
}
# values that are refused, where it is not any
VALUES = {
    'cuda_graph_impl': ['local', 'transformer_engine', 'full_iteration'],
    'transformer_impl': ['transformer_engine', 'inference_optimized'],
    'attention_backend': ['flash', 'fused', SimpleNamespace(name='flash')],
    'context_parallel_size': [2],
    'fp8_recipe': ['mxfp8'],
    'tensor_parallel_num_weight_shards': [2, '2'],
    'expert_tensor_parallel_num_weight_shards': [2],
    'hybrid_layer_pattern': ['M*|M-|M*|M-'],
    'hybrid_override_pattern': ['M*M-'],
    'hybrid_attention_ratio': [0.5],
    'hybrid_mlp_ratio': [0.25],
}


HYBRID = [s for s in refusals.settings() if s.startswith('hybrid_') and 'context' not in s]
# but for what is refused with others, or by some releases, only
OF_SLICES = ['variable_seq_lengths', 'experimental_attention_variant', 'logits_load_dir']
OF_SLICES += ['moe_expert_capacity_factor', 'moe_expert_rank_capacity_factor']
OF_SLICES += ['moe_enable_routing_replay']
OF_REPLICAS = ['overlap_grad_reduce', 'overlap_param_gather', 'expert_model_parallel_size']
OF_REPLICAS += ['moe_router_load_balancing_type']
OTHERS = ['fp8_recipe', 'mtp_num_layers', 'sft', 'reset_attention_mask', *HYBRID, *OF_SLICES]
OF_SHARDS = ['use_mup', 'defer_embedding_wgrad_compute', 'init_model_with_meta_device']
OTHERS += [*OF_REPLICAS, *OF_SHARDS, 'cross_entropy_fusion_impl']
OTHERS += ['untie_embeddings_and_output_weights', 'position_embedding_type']
WITHOUT_TE = [s for s in refusals.settings() if s not in OTHERS]
CASES = [(setting, value) for setting in WITHOUT_TE for value in VALUES.get(setting, [1])]


# of flags whose setting has another name, what they set; of cures without a flag
FLAGS = {
    '--fp8-format': ['fp8'],
    '--fp4-format': ['fp4'],
    '--cpu-offloading-num-layers': ['cpu_offloading', 'cpu_offloading_num_layers'],
    '--rope-fusion': ['apply_rope_fusion'],
}
INSTEAD = ('use_megatron_fsdp', 'use_torch_fsdp2')  # of which --use-distributed-optimizer is
ALIKE = 'num_microbatches_with_partial_activation_checkpoints'


def cured(settings, found):
    """The settings with what the cure names first done: a flag dropped, or given a value."""
    values = dict(vars(settings))
    if words := re.search(r'\b(drop|give|use) --(no-)?([a-z0-9-]+)(?: ([a-z0-9_]+))?', found.cure):
        what, no, name, value = words.groups()
        names = FLAGS.get(f'--{name}', [name.replace('-', '_')])
        given = None if what == 'drop' or no else value or True
        given = int(given) if isinstance(given, str) and given.isdigit() else given
        values |= dict.fromkeys(names, given)
        values |= {found.setting: None} if found.setting in INSTEAD else {}
    elif found.setting == ALIKE:  # recompute all alike
        values[ALIKE] = None
    return SimpleNamespace(**values)
