"""The table of refusals by what a schedule has: slices, recomputation, overlaps, replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megatron_zbpp.mcore.refusal import (
    HYBRID,
    RECIPES,
    Refusal,
    captured,
    hybrid,
    scales_late,
    set_in,
)
from megatron_zbpp.techniques.composition import BOTH, CLASHES, EMBEDDING, SLICED, VOCABULARY
from megatron_zbpp.techniques.composition import OVERLAP as COMBINED

OVERLAP = 'overlap_moe_expert_parallel_comm'
_WITHOUT_STATE = '*-E|'  # in a pattern: attention, MLP, experts, segments
# what slices of a sequence would change, or nobody has made for them
_WHOLE = 'or take a schedule of whole sequences'
WITH_SLICES = {
    'mtp_num_layers': (
        'the last token of a slice needs the first one of the next',
        'drop --mtp-num-layers',
    ),
    'sft': ('slices do not know where packed sequences end', 'drop --sft'),
    'variable_seq_lengths': (
        'slices have one length in all microbatches',
        'pad microbatches to one length',
    ),
    'experimental_attention_variant': (
        'its layers would need a state of the slices before',
        'drop --experimental-attention-variant',
    ),
    OVERLAP: (
        'no forward of a slice runs as one with a backward',
        'drop --overlap-moe-expert-parallel-comm',
    ),
    'export_kd_teacher_load': (
        "a teacher's layers keep no slices",
        'drop --export-kd-teacher-load',
    ),
    'logits_load_dir': (
        'its loss is of whole sequences',
        'drop --logits-load-dir',
    ),
    'moe_expert_capacity_factor': (
        'the capacity of experts would be that of a slice',
        'drop --moe-expert-capacity-factor',
    ),
    'moe_expert_rank_capacity_factor': (
        'the capacity of ranks of experts would be that of a slice',
        'drop --moe-expert-rank-capacity-factor',
    ),
    'moe_enable_routing_replay': (
        'what it records and replays is of whole microbatches',
        'drop --moe-enable-routing-replay',
    ),
}
# what needs the whole output layer, or its logits, on one rank
_UNDIVIDED = 'or leave out --pipeline-vocab-parallel'
_LOGITS = 'no rank has the logits of all words'
WITH_SHARDS = {
    'mtp_num_layers': (
        'multi-token prediction runs the output layer again for each depth',
        'drop --mtp-num-layers',
    ),
    'export_kd_teacher_load': (_LOGITS, 'drop --export-kd-teacher-load'),
    'logits_load_dir': (_LOGITS, 'drop --logits-load-dir'),
    'use_mup': ('it scales the logits, which shards do not', 'drop --use-mup'),
    'defer_embedding_wgrad_compute': (
        'T passes defer the weight gradient of the output layer already',
        'drop --defer-embedding-wgrad-compute',
    ),
    'variable_seq_lengths': (
        'collectives of hidden states have one length in all microbatches',
        'pad microbatches to one length',
    ),
    'init_model_with_meta_device': (
        'ranks get their rows of a weight that has values',
        'drop --init-model-with-meta-device',
    ),
}
FUSED_LOSS, UNTIED = 'cross_entropy_fusion_impl', 'untie_embeddings_and_output_weights'
_EXPERT_RANKS, _BALANCING = 'expert_model_parallel_size', 'moe_router_load_balancing_type'
_GLOBAL = 'global_aux_loss'
_BY_TOKEN = {'none', 'aux_loss', 'seq_aux_loss'}  # whose routers look at one token at a time
ACROSS_REPLICAS = {
    'overlap_grad_reduce': 'drop --overlap-grad-reduce',
    'overlap_param_gather': 'drop --overlap-param-gather',
    _EXPERT_RANKS: 'give 1',
    _BALANCING: 'give --moe-router-load-balancing-type aux_loss',
}
# what asynchronous schedules have not been tried with
_SYNCHRONOUS = 'or take a synchronous schedule, such as zb-v'
_UNTRIED = 'weights of several versions have not been tried with it'
WITH_VERSIONS = {
    'overlap_param_gather': 'drop --overlap-param-gather',
    'fp8': 'drop --fp8-format',
    'fp4': 'drop --fp4-format',
    'mtp_num_layers': 'drop --mtp-num-layers',
    'optimizer_cpu_offload': 'drop --optimizer-cpu-offload',
    'fine_grained_activation_offloading': 'drop --fine-grained-activation-offloading',
    'save_params_interval': 'drop --save-params-interval',
    'experimental_attention_variant': 'drop --experimental-attention-variant',
    'moe_enable_routing_replay': 'drop --moe-enable-routing-replay',
}
_COUNTS = 'forwards of the next batch have counted tokens of experts before this one ends'
_TRIED = {'aux_loss', 'seq_aux_loss', 'sinkhorn', 'none'}  # whose routers keep no counts
# what NVIDIA's loop reads of the forwards of one iteration, or hooks when that begins
READ_BY_LOOP = (
    'save_activations_interval',
    'save_tokens_per_expert_interval',
    'save_dgrads_interval',
    'log_max_attention_logit',
    'qk_clip',
    'moe_routing_trace_path',
)
_AHEAD = 'forwards of the next batch run before Megatron reads what those of this one have left'
_COUNTED = {'moe_router_enable_expert_bias': (_COUNTS, 'drop --moe-router-enable-expert-bias')}
_UNSEEDED = 'or leave out --pipeline-dropout-seeds'
_OTHER_ORDERS = 'the two replicas of a pair run their stages in other orders, and would deadlock'


def with_techniques(settings: Any, techniques: Collection[str]) -> Iterator[Refusal]:
    """Yield what does not go with the techniques that a schedule has."""
    if SLICED in techniques:
        yield from _with_slices(settings)
    if VOCABULARY in techniques:
        yield from _with_shards(settings, EMBEDDING in techniques)
    if 'recompute' in techniques:
        yield from _with_recomputation(settings)
    if 'updating' in techniques:
        yield from with_versions(settings)
    if getattr(settings, OVERLAP, False):
        yield from _with_cells(techniques)


def with_versions(settings: Any) -> Iterator[Refusal]:
    """Yield what asynchronous schedules do not train with yet."""
    table = {name: (_UNTRIED, cure) for name, cure in WITH_VERSIONS.items()}
    read = {name: (_AHEAD, f'drop --{name.replace("_", "-")}') for name in READ_BY_LOOP}
    yield from set_in(table | _COUNTED | read, settings, _SYNCHRONOUS)
    kinds = getattr(settings, _BALANCING, None) or 'none'
    if others := {kinds} - _TRIED if isinstance(kinds, str) else {*kinds} - _TRIED:
        reason = _COUNTS if others <= {_GLOBAL, 'quantile_balancing'} else _UNTRIED
        yield Refusal(_BALANCING, kinds, reason, f'{ACROSS_REPLICAS[_BALANCING]}, {_SYNCHRONOUS}')
    ranks = getattr(settings, 'context_parallel_size', None) or 1
    if ranks > 1:
        yield Refusal('context_parallel_size', ranks, _UNTRIED, f'give 1, {_SYNCHRONOUS}')
    if (mode := getattr(settings, 'rerun_mode', None)) not in (None, 'disabled'):
        reason = 'forwards of the next batch have read data when an iteration is to run again'
        yield Refusal('rerun_mode', mode, reason, f'give --rerun-mode disabled, {_SYNCHRONOUS}')
    if graphs := captured(settings):
        cure = f'give --cuda-graph-impl none, {_SYNCHRONOUS}'
        yield Refusal('cuda_graph_impl', graphs, 'captured passes have one version', cure)


def across_replicas(settings: Any) -> Iterator[Refusal]:
    """Yield what makes replicas wait for each other amid passes that they run in other orders."""
    for setting, cure in ACROSS_REPLICAS.items():
        value = getattr(settings, setting, None)
        if setting == _BALANCING:
            value = value if _GLOBAL in str(value) else None
        elif setting == _EXPERT_RANKS:
            value = value if (value or 1) > 1 else None
        if value:
            yield Refusal(setting, value, _OTHER_ORDERS, f'{cure}, or take chimera as it is')


def _with_slices(settings: Any) -> Iterator[Refusal]:
    yield from set_in(WITH_SLICES, settings, _WHOLE)
    ranks = getattr(settings, 'context_parallel_size', 1)
    if ranks > 1:
        reason = 'its ranks share out whole sequences'
        yield Refusal('context_parallel_size', ranks, reason, f'give 1, {_WHOLE}')
    yield from _sliced_layers(settings)
    balancing = getattr(settings, _BALANCING, None)
    if not_by_token(balancing):
        reason = 'it looks at all tokens of a microbatch, or of several'
        cure = f'{ACROSS_REPLICAS[_BALANCING]}, {_WHOLE}'
        yield Refusal(_BALANCING, balancing, reason, cure)
    if (positions := getattr(settings, 'position_embedding_type', None)) == 'mrope':
        reason = 'its positions have an axis before that of sequences, which slices do not cut'
        cure = f'give --position-embedding-type rope, {_WHOLE}'
        yield Refusal('position_embedding_type', positions, reason, cure)
    if graphs := captured(settings):
        reason = 'a captured forward has one slice'
        yield Refusal('cuda_graph_impl', graphs, reason, f'give --cuda-graph-impl none, {_WHOLE}')
    if scales_late(settings):
        recipe = getattr(settings, 'fp8_recipe', None)
        reason = 'each slice would enter its largest values as those of a microbatch'
        yield Refusal('fp8_recipe', recipe, reason, f'give --fp8-recipe {RECIPES[0]}, {_WHOLE}')
    yield from _sliced_attention(settings)


def not_by_token(balancing: str | Sequence[str] | None) -> str:
    """Return load-balancing types that are not known to route token by token; empty: all are."""
    types = [balancing] if isinstance(balancing, str) else balancing or ()
    return ', '.join(each for each in types if each not in _BY_TOKEN)


def _sliced_layers(settings: Any) -> Iterator[Refusal]:
    """Yield patterns of hybrid models whose layers cannot run slice by slice."""
    pattern = hybrid(settings)
    if pattern is None:
        return
    layers = getattr(settings, pattern)
    if pattern != HYBRID[0] or set(layers) - set(_WITHOUT_STATE) or not _has_hybrid_model():
        reason = 'some of its layers need a state of the slices before, or are not known to cut'
        cure = f'have attention, MLP and experts alone (*, -, E), from 0.18 on, {_WHOLE}'
        yield Refusal(pattern, layers, reason, cure)


def _sliced_attention(settings: Any) -> Iterator[Refusal]:
    """Yield fused kernels that take each slice for a sequence of its own."""
    latent = getattr(settings, 'multi_latent_attention', False)
    if latent and getattr(settings, 'apply_rope_fusion', False):
        reason = 'fused, multi-latent attention takes positions from the first token on'
        yield Refusal('apply_rope_fusion', True, reason, 'give --no-rope-fusion')
    local = getattr(settings, 'transformer_impl', None) == 'local'
    if local and getattr(settings, 'masked_softmax_fusion', False):
        reason = 'its kernel takes square masks'
        yield Refusal('masked_softmax_fusion', True, reason, 'give --no-masked-softmax-fusion')


def _with_shards(settings: Any, of_both: bool) -> Iterator[Refusal]:
    yield from set_in(WITH_SHARDS, settings, _UNDIVIDED)
    fusion = getattr(settings, FUSED_LOSS, None)
    if getattr(settings, 'cross_entropy_loss_fusion', False) and fusion not in (None, 'native'):
        cure = f'give --cross-entropy-fusion-impl native, {_UNDIVIDED}'
        yield Refusal(FUSED_LOSS, fusion, 'its kernel takes the logits of all words', cure)
    if not of_both and not getattr(settings, UNTIED, True):
        reason = 'the output layer is the embedding, which is on the first stage alone'
        cure = f'give --pipeline-vocab-parallel {BOTH}, or --{UNTIED.replace("_", "-")}'
        yield Refusal(UNTIED, False, reason, f'{cure}, {_UNDIVIDED}')
    if graphs := captured(settings):
        reason = 'a captured last stage hands on no hidden states'
        yield Refusal('cuda_graph_impl', graphs, reason, 'give --cuda-graph-impl none')


def _with_recomputation(settings: Any) -> Iterator[Refusal]:
    if scales_late(settings):
        recipe = getattr(settings, 'fp8_recipe', None)
        reason = 'a forward that runs again would enter its largest values a second time'
        yield Refusal('fp8_recipe', recipe, reason, f'give --fp8-recipe {RECIPES[0]}')
    if graphs := captured(settings):
        reason = 'a captured forward cannot run again with other random states'
        yield Refusal('cuda_graph_impl', graphs, reason, 'give --cuda-graph-impl none')


def with_seeds(settings: Any) -> Iterator[Refusal]:
    """Yield what runs layers in which no seed can be set."""
    if getattr(settings, OVERLAP, False):
        cure = f'drop --overlap-moe-expert-parallel-comm, {_UNSEEDED}'
        yield Refusal(OVERLAP, True, 'layers run in parts, which have no seeds', cure)
    if graphs := captured(settings):
        reason, cure = 'captured layers cannot be seeded', 'give --cuda-graph-impl none'
        yield Refusal('cuda_graph_impl', graphs, reason, f'{cure}, {_UNSEEDED}')


def _with_cells(techniques: Collection[str]) -> Iterator[Refusal]:
    for name in techniques:
        if clash := CLASHES.get((COMBINED, name)):
            yield Refusal(OVERLAP, True, *clash)


def _has_hybrid_model() -> bool:
    from megatron_zbpp.mcore import compat  # imports Megatron, which has not been until here

    return compat.hybrid_model() is not None
