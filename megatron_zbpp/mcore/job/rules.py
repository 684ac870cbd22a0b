"""Rules: which of Megatron's settings do not go with which schedules, why, and what to do.

Rows are asked in this order, and what they say is told in it.

    # CONDITION | CURE BESIDE THAT OF EACH ROW
    SETTING is VALUE if CONDITION and CONDITION: REASON | CURE

A row without a value is about a setting that is set; without a cure, of what is refused, the cure
is to drop it. Several settings between commas are as many rows. Lines that are indented go on. A
line `effect: EFFECT` holds for the rows behind it. Texts name settings in braces: see
`options.Names`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from megatron_zbpp.emulation import te
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.model_settings import (
    HYBRID,
    IN_A_LOOP,
    OFFLOADED,
    OFFLOADING,
    not_by_token,
)
from megatron_zbpp.mcore.model_settings import OVERLAP as PAIRS
from megatron_zbpp.mcore.options import Names
from megatron_zbpp.mcore.settings import BY_FLAG
from megatron_zbpp.techniques.composition import CLASHES, EMBEDDING, OVERLAP, SLICED, VOCABULARY

REFUSED = 'refused'
"""The effect of most rules: a job does not start. Others: the setting is ignored, and taken back;
it is a barrier, at which ranks wait for each other in each iteration although steps do not; or
optimizer steps are those that all ranks wait for."""

WAIT = 'optimizer steps wait for all ranks: %s'


@dataclass(frozen=True)
class Context:
    """Facts that conditions ask: Megatron's settings, the schedule, the machine."""

    sources: tuple[Any, ...]  # objects with settings: arguments, configs of model and of DDP
    on_cpu: bool = False  # also what only a GPU can
    with_te: bool = False  # on a CPU: Transformer Engine is there, its kernels emulated
    placement: Placement | None = None  # None: not known yet
    splits: bool = True  # the schedule has W passes
    techniques: frozenset[str] = frozenset()  # names of those that the schedule has
    joins: bool = False  # it can run a forward and a backward as one
    in_order: bool = False  # it runs back as Megatron's own offloading takes for granted
    mirrored: bool = True  # ranks that hold the same stages run them in one order
    seeded: bool = False  # each layer has its own seeds of dropout
    by_bridge: bool = False  # Megatron-Bridge makes the model

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting of the first source that has it, or a variable of the environment."""
        if name.isupper():
            return os.environ.get(name, default)
        for source in self.sources:
            value = getattr(source, name, _ABSENT)
            if value is not _ABSENT:
                return value.name if isinstance(value, Enum) else value
        return default

    def first(self, names: Iterable[str]) -> str | None:
        """Return the first name that is set."""
        return next((name for name in names if self.get(name)), None)

    @property
    def num_stages(self) -> int:
        if self.placement is not None:
            return self.placement.num_stages
        chunks = self.get('virtual_pipeline_model_parallel_size') or 1
        return self.get('pipeline_model_parallel_size', 1) * chunks


_ABSENT = object()


class Condition(NamedTuple):
    """A condition, with the words that the docs have for it."""

    text: str
    holds: Callable[..., Any]  # of the context, or of the value of the row's setting and it


class Rule(NamedTuple):
    """A row: a setting that has an effect where both conditions hold."""

    settings: tuple[str, ...]  # of several the first that is set
    value: Condition
    when: Condition
    reason: str | Callable[[Context], str]
    cure: str
    effect: str


@dataclass(frozen=True)
class Refusal:
    """A setting for which a rule holds, and what is said of it."""

    setting: str  # its name in Megatron's arguments or config
    value: object
    reason: str
    cure: str

    def __str__(self) -> str:
        return f'{self.setting}={self.value}: {self.reason}' + (self.cure and f'; {self.cure}')


def check(context: Context, rules: Iterable[Rule], names: Names = BY_FLAG) -> Iterator[Refusal]:
    """Yield what is said of each rule that holds, in the order of the rules."""
    for rule in rules:
        name = context.first(rule.settings) or rule.settings[0]
        value = context.get(name)
        if rule.value.holds(value, context) and rule.when.holds(context):
            reason = rule.reason if isinstance(rule.reason, str) else rule.reason(context)
            yield Refusal(name, value, names.fill(reason), names.fill(rule.cure))


GROUPED_VARIABLE = 'NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM'


# --- conditions on a value
def _balancing(value: Any) -> set[str]:
    return {value or 'none'} if isinstance(value, str | None) else {*value}


_COUNTING = {'global_aux_loss', 'quantile_balancing'}  # tokens, over microbatches
_NOT_COUNTING = {'none', 'aux_loss', 'seq_aux_loss', 'sinkhorn'}


def _more_shards(value: Any, c: Context, *sizes: str) -> bool:
    ranks = next((size for name in sizes if (size := c.get(name))), 1)
    return bool(value) and int(value) > ranks


def _graphs_of_passes(value: Any, c: Context) -> Any:
    scope = c.get('cuda_graph_scope') or ()
    scopes = [scope] if isinstance(scope, str) else scope
    whole = any(getattr(each, 'name', each) == 'full_iteration' for each in scopes)
    return value and value != 'none' and (c.splits or value != 'local' or whole)


def _with_state(layers: Any, c: Context) -> bool:
    if not layers:
        return False
    if c.first(HYBRID) != HYBRID[0] or set(layers) - set('*-E|'):  # attention, MLP, experts
        return True
    return _of_release(lambda compat: compat.hybrid_model() is None)(c)


def _kernels(c: Context) -> str:
    """Return letters of a hybrid model's pattern whose layers need kernels of a GPU."""
    pattern = c.get(c.first(HYBRID) or '')
    letters = pattern if isinstance(pattern, str) else 'M'  # a ratio: the rest is Mamba
    known = {'M': 'Mamba', 'G': 'Gated DeltaNet', 'D': 'DeepSeek sparse attention'}
    return ', '.join(f'{letter} ({kind})' for letter, kind in known.items() if letter in letters)


VALUES: dict[str, Callable[[Any, Context], Any]] = {
    'set': lambda value, c: value,
    'off': lambda value, c: not c.get('untie_embeddings_and_output_weights', True),
    'above 1': lambda value, c: (value or 1) > 1,
    '1': lambda value, c: value == 1,
    'above 0': lambda value, c: (value or '').strip('0 '),  # of the environment
    'above tensor parallelism': lambda value, c: _more_shards(
        value, c, 'tensor_model_parallel_size'
    ),
    'above tensor parallelism of experts': lambda value, c: _more_shards(
        value, c, 'expert_tensor_parallel_size', 'tensor_model_parallel_size'
    ),
    'delayed': lambda value, c: c.get('fp8') and value in (None, 'delayed'),
    'with `global_aux_loss`': lambda value, c: 'global_aux_loss' in str(value),
    'counting tokens': lambda value, c: set() < _balancing(value) - _NOT_COUNTING <= _COUNTING,
    'counting, or unknown': lambda value, c: _balancing(value) - _NOT_COUNTING - _COUNTING,
    'not by token': lambda value, c: not_by_token(value),
    'other than fp32 and bf16': lambda value, c: (
        str(value or 'torch.float32') not in ('torch.float32', 'torch.bfloat16')
    ),
    'of several passes': _graphs_of_passes,
    'with layers that have a state': _with_state,
    'with `M`, `G` or `D`': lambda value, c: value and _kernels(c),
}


# --- conditions on the context
def _of_release(test: Callable[[Any], Any]) -> Callable[[Context], bool]:
    def holds(_: Context) -> bool:
        from megatron_zbpp.mcore import compat  # imports Megatron, which has not been until here

        return bool(test(compat))

    return holds


def _placed(test: Callable[[Placement], bool]) -> Callable[[Context], bool]:
    return lambda c: c.placement is not None and test(c.placement)


def _one_layer(c: Context) -> bool:
    """Chunks of one layer have several modules that are offloaded.

    From the second iteration on the last of each module in its chunk stays on the device. In chunks
    of one layer that is all of them; and releases that keep no note of modules that stay then have
    the next module of that layer in the next chunk.
    """
    modules = c.get(OFFLOADED) if c.get(OFFLOADING) else None
    return c.in_order and len(modules or ()) > 1 and c.get('num_layers') < 2 * c.num_stages


CONDITIONS: dict[str, Callable[[Context], Any]] = {
    'every schedule': lambda c: True,
    'post-validation': lambda c: True,  # who asks knows that
    'post-validation and asynchronous schedules': lambda c: True,
    'W passes': lambda c: c.splits,
    'W passes or graphs that are not `local`': lambda c: True,  # see `_graphs_of_passes`
    'slices of sequences': lambda c: SLICED in c.techniques,
    'the output layer on all ranks': lambda c: VOCABULARY in c.techniques,
    'the embedding on one': lambda c: EMBEDDING not in c.techniques,
    'recompute passes': lambda c: 'recompute' in c.techniques,
    'offload passes': lambda c: 'offload' in c.techniques,
    'evict passes': lambda c: 'evict' in c.techniques,
    'split_vocabulary passes': lambda c: VOCABULARY in c.techniques,
    'split_embedding passes': lambda c: EMBEDDING in c.techniques,
    'asynchronous schedules': lambda c: 'updating' in c.techniques,
    'two-way schedules without mirror symmetry': lambda c: not c.mirrored,
    'schedules without overlapped pairs': lambda c: not c.joins,
    'chunks that run back in another order': lambda c: not c.in_order,
    'chunks of one layer': _one_layer,
    'seeds of dropout': lambda c: c.seeded,
    'several chunks a rank': _placed(lambda placement: placement.num_chunks > 1),
    'more than two ranks': _placed(lambda placement: placement.num_ranks > 2),
    'two ranks': _placed(lambda placement: placement.num_ranks <= 2),
    'stages in no loop': _placed(lambda placement: not placement.is_loop),
    'both ends on two ranks': _placed(
        lambda placement: placement.only_route[0] != placement.only_route[-1]
    ),
    'more than two stages': lambda c: c.num_stages > 2,
    'masks in batches': lambda c: c.get('create_attention_mask_in_dataloader', True),
    'hybrid models': lambda c: c.first(HYBRID),
    'tied embeddings': lambda c: not c.get('untie_embeddings_and_output_weights', True),
    "Megatron's own attention": lambda c: c.get('transformer_impl') == 'local',
    'no attention of its own': lambda c: not c.get('spec'),
    'Transformer Engine decides': lambda c: c.get('moe_use_grouped_tensor') is None,
    'on a CPU': lambda c: c.on_cpu,
    'without Transformer Engine': lambda c: not c.with_te,
    'with Transformer Engine': lambda c: c.with_te,
    'Megatron-Bridge': lambda c: c.by_bridge,
    'until 0.16': _of_release(lambda compat: compat.segments_module() is None),
    'until 0.17': _of_release(lambda m: not m.get_batch_module().startswith('megatron.core')),
    'until 0.18': _of_release(lambda compat: not compat.tells_all_stages_of_sequences()),
    '0.19': _of_release(lambda compat: compat.forgets_modules_that_stay()),
}
REASONS: dict[str, Callable[[Context], str]] = {
    '(Transformer Engine)': lambda c: te.missing() or te.NOT_INSTALLED,
    '(kernels)': lambda c: f'kernels of {_kernels(c)} need a GPU',
}


def rows(text: str) -> Iterator[Rule]:
    """Yield the rules of a text: see above."""
    where, instead, effect = '', '', REFUSED
    for line in re.sub(r'\n +', ' ', text).strip().splitlines():
        if line.startswith('# '):
            where, _, instead = line[2:].partition(' | ')
        elif line.startswith('effect: '):
            effect = line.removeprefix('effect: ')
        elif line:
            head, _, said = line.partition(': ')
            reason, _, cure = said.partition(' | ')
            head, _, conditions = head.partition(' if ')
            names, _, value = head.partition(' is ')
            when = _when(where, *(conditions.split(' and ') if conditions else ()))
            if effect == REFUSED:
                cure = cure or 'drop {}'
            cure = ', '.join(filter(None, (cure, instead)))
            for name in names.split(', '):
                settings = HYBRID if name == 'hybrid' else (name,)
                own = cure.replace('{}', f'{{{name}}}')
                yield Rule(settings, _is(value), when, REASONS.get(reason, reason), own, effect)


def _is(words: str) -> Condition:
    quoted = re.findall('`(.+?)`', words)
    if holds := VALUES.get(words or 'set'):
        return Condition(words, holds)
    assert quoted, words
    if words.startswith('other than '):
        return Condition(words, lambda value, c: value and value not in quoted)
    return Condition(words, lambda value, c: value in quoted)


def _when(*conditions: str) -> Condition:
    """Return the condition that all of these hold, of which one may be another setting."""

    def of(words: str) -> Callable[[Context], Any]:
        if holds := CONDITIONS.get(words):
            return holds
        (name,) = re.findall('^`(.+)`$', words)
        return lambda c: c.get(name)

    tests = [of(words) for words in conditions]
    text = ', '.join(words for words in conditions if words != 'every schedule')
    return Condition(text, lambda c: all(test(c) for test in tests))


_OVERLAPPED = (  # pairs of a forward and a backward that run as one
    f'# {name} passes\n{PAIRS}: {clash.reason} | {clash.cure}'
    for (first, name), clash in CLASHES.items()
    if first == OVERLAP
)
RULES = tuple(
    rows(
        """
# Megatron-Bridge
dist.use_decentralized_pg: its groups are made without asking where the schedule has its stages
    | leave it False
hybrid_layer_pattern if several chunks a rank: Bridge's hybrid models have one chunk on a rank
    | take a schedule that has one, such as zb-h1

# two-way schedules without mirror symmetry | or take chimera as it is
overlap_grad_reduce, overlap_param_gather: the two replicas of a pair run their stages in other
    orders, and would deadlock
expert_model_parallel_size is above 1: the two replicas of a pair run their stages in other orders,
    and would deadlock | give 1
moe_router_load_balancing_type is with `global_aux_loss`: the two replicas of a pair run their
    stages in other orders, and would deadlock | give {moe_router_load_balancing_type:aux_loss}

# every schedule
num_microbatches_with_partial_activation_checkpoints: a schedule holds the activations of all
    microbatches alike | recompute all microbatches alike
external_cuda_graph: a captured backward computes weight gradients at once
use_megatron_fsdp: it shares all ranks out among data and tensor parallelism, and fails where a
    pipeline has some | use {use_distributed_optimizer}
use_torch_fsdp2: Megatron itself has it without pipelines only | use {use_distributed_optimizer}
hybrid_context_parallel: its groups differ from microbatch to microbatch
use_transformer_engine_op_fuser: its fused operations keep weight gradients where no W pass finds
    them
moe_paged_stash: it follows the order of Megatron's own schedules
cpu_offloading, cpu_offloading_num_layers: Megatron itself has it without pipelines only
    | drop {cpu_offloading_num_layers} for {offload}
use_legacy_models: legacy models have layers of their own, whose weight gradients cannot wait
overlap_moe_expert_parallel_comm if schedules without overlapped pairs: this schedule has no forward
    that runs as one with a backward | take dualpipe-v, or drop {}
fine_grained_activation_offloading if chunks that run back in another order: it takes backwards to
    come as in Megatron's own schedules, each forward to run once, and steps to wait for all ranks
    | drop {} for {offload}, which any schedule takes, or take 1f1b, zb-h1, interleaved or
    zb-interleaved, by itself
offload_modules if chunks of one layer and 0.19: this release of Megatron takes a chunk of one layer
    for finished after its first module: in the second iteration it ends with 'Chunk mismatch', also
    by Megatron's own schedules | have two layers or more in each chunk, give one of {}, or drop
    {fine_grained_activation_offloading} for {offload}

# W passes | or take a schedule without W passes, such as 1f1b or interleaved
overlap_dispatch_backward_with_experts_wgrad: W passes defer the experts' weight gradients already
tp_comm_overlap: Transformer Engine cannot delay weight gradients with userbuffers
enable_cuda_graph: a captured backward computes weight gradients at once
moe_use_grouped_tensor, moe_single_grouped_weight, moe_single_grouped_bias: W passes cannot keep
    Transformer Engine's GroupedTensor, which has no update_usage to drop what W does not read
NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM is above 0 if `moe_grouped_gemm` and Transformer Engine
    decides: W passes cannot keep Transformer Engine's GroupedTensor, which has no update_usage to
    drop what W does not read | unset it
tensor_parallel_num_weight_shards is above tensor parallelism: weights that are sharded further than
    tensor parallelism does are gathered in the order of the first forward, and their gradients
    reduced one backward later: neither is that of W passes
expert_tensor_parallel_num_weight_shards is above tensor parallelism of experts: weights that are
    sharded further than tensor parallelism does are gathered in the order of the first forward, and
    their gradients reduced one backward later: neither is that of W passes

# W passes or graphs that are not `local`
cuda_graph_impl is of several passes: captured graphs compute weight gradients at once, or in the
    order of Megatron's own schedules | give {cuda_graph_impl:none}, or local with a schedule
    without W passes, such as 1f1b

# slices of sequences | or take a schedule of whole sequences
mtp_num_layers: the last token of a slice needs the first one of the next
sft: slices do not know where packed sequences end
variable_seq_lengths: slices have one length in all microbatches | pad microbatches to one length
experimental_attention_variant: its layers would need a state of the slices before
overlap_moe_expert_parallel_comm: no forward of a slice runs as one with a backward
export_kd_teacher_load: a teacher's layers keep no slices
logits_load_dir: its loss is of whole sequences
moe_expert_capacity_factor: the capacity of experts would be that of a slice
moe_expert_rank_capacity_factor: the capacity of ranks of experts would be that of a slice
moe_enable_routing_replay: what it records and replays is of whole microbatches
context_parallel_size is above 1: its ranks share out whole sequences | give 1
hybrid is with layers that have a state: some of its layers need a state of the slices before, or
    are not known to cut | have attention, MLP and experts alone (*, -, E), from 0.18 on
moe_router_load_balancing_type is not by token: it looks at all tokens of a microbatch, or of
    several | give {moe_router_load_balancing_type:aux_loss}
position_embedding_type is `mrope`: its positions have an axis before that of sequences, which
    slices do not cut | give {position_embedding_type:rope}
cuda_graph_impl is other than `none`: a captured forward has one slice
    | give {cuda_graph_impl:none}
fp8_recipe is delayed: each slice would enter its largest values as those of a microbatch
    | give {fp8_recipe:tensorwise}
# slices of sequences
apply_rope_fusion if `multi_latent_attention`: fused, multi-latent attention takes positions from
    the first token on | give {apply_rope_fusion:off}
masked_softmax_fusion if Megatron's own attention: its kernel takes square masks
    | give {masked_softmax_fusion:off}

# the output layer on all ranks | or leave out {vocab_parallel}
mtp_num_layers: multi-token prediction runs the output layer again for each depth
export_kd_teacher_load, logits_load_dir: no rank has the logits of all words
use_mup: it scales the logits, which shards do not
defer_embedding_wgrad_compute: T passes defer the weight gradient of the output layer already
variable_seq_lengths: collectives of hidden states have one length in all microbatches
    | pad microbatches to one length
init_model_with_meta_device: ranks get their rows of a weight that has values
cross_entropy_fusion_impl is other than `native` if `cross_entropy_loss_fusion`: its kernel takes
    the logits of all words | give {cross_entropy_fusion_impl:native}
untie_embeddings_and_output_weights is off if the embedding on one: the output layer is the
    embedding, which is on the first stage alone | give {vocab_parallel:input+output}, or {}
# the output layer on all ranks
cuda_graph_impl is other than `none`: a captured last stage hands on no hidden states
    | give {cuda_graph_impl:none}

# recompute passes
fp8_recipe is delayed: a forward that runs again would enter its largest values a second time
    | give {fp8_recipe:tensorwise}
cuda_graph_impl is other than `none`: a captured forward cannot run again with other random states
    | give {cuda_graph_impl:none}

# asynchronous schedules | or take a synchronous schedule, such as zb-v
overlap_param_gather, fp8, fp4, mtp_num_layers, optimizer_cpu_offload,
    fine_grained_activation_offloading, save_params_interval, experimental_attention_variant,
    moe_enable_routing_replay: weights of several versions have not been tried with it
moe_router_enable_expert_bias: forwards of the next batch have counted tokens of experts before this
    one ends
save_activations_interval, save_tokens_per_expert_interval, save_dgrads_interval,
    log_max_attention_logit, qk_clip, moe_routing_trace_path: forwards of the next batch run before
    Megatron reads what those of this one have left
moe_router_load_balancing_type is counting tokens: forwards of the next batch have counted tokens of
    experts before this one ends | give {moe_router_load_balancing_type:aux_loss}
moe_router_load_balancing_type is counting, or unknown: weights of several versions have not been
    tried with it | give {moe_router_load_balancing_type:aux_loss}
context_parallel_size is above 1: weights of several versions have not been tried with it | give 1
rerun_mode is other than `disabled`: forwards of the next batch have read data when an iteration is
    to run again | give {rerun_mode:disabled}
cuda_graph_impl is other than `none`: captured passes have one version
    | give {cuda_graph_impl:none}
(overlapped)

# seeds of dropout | or leave out {dropout_seeds}
overlap_moe_expert_parallel_comm: layers run in parts, which have no seeds
cuda_graph_impl is other than `none`: captured layers cannot be seeded
    | give {cuda_graph_impl:none}

# every schedule
hybrid if stages in no loop and until 0.16: (in a loop)

sft if more than two stages and until 0.18: this release of Megatron tells the first and the last
    stage alone where packed sequences end: the layers between would attend from one to the next
    | have two stages in all, as zb-h1 on 2 ranks has, or take megatron-core from 0.19 on

# several chunks a rank
reset_attention_mask if masks in batches and more than two ranks: Megatron gives such masks to the
    first and the last stage alone, by its 1F1B on more than two ranks, too: no schedule with
    several chunks a rank trains the same as that | have two pipeline ranks, take a schedule with
    one chunk a rank, such as zb-h1, or drop {}
reset_attention_mask if masks in batches and two ranks and hybrid models and until 0.17: this
    release's script of hybrid models gives such masks to the first and the last stage alone | take
    a schedule with one chunk a rank, such as zb-h1, or megatron-core from 0.18 on, or drop {}
modelopt_enabled, export_kd_teacher_load: Megatron's builder of ModelOpt models knows one chunk a
    rank | take a schedule with one chunk a rank, such as zb-h1, or drop {}
perform_rl_step: Megatron's train_rl.py scores by the first chunk of each rank, and has no data for
    others | take a schedule with one chunk a rank, such as zb-h1, or drop {}

# every schedule
mtp_num_layers if tied embeddings: with tied embeddings Megatron cannot save the last of several
    pipeline ranks, which has two output layers for one | give {untie_embeddings_and_output_weights}

# on a CPU
fp4, use_flash_attn, moe_permute_fusion: its kernels need a GPU
masked_softmax_fusion: its kernels need a GPU | give {masked_softmax_fusion:off}
apply_rope_fusion: its kernels need a GPU | give {apply_rope_fusion:off}
fp8, moe_grouped_gemm if without Transformer Engine: (Transformer Engine)
hybrid is with `M`, `G` or `D`: (kernels)
    | have a pattern of other layers (*, -, E, +) where there is no GPU
transformer_impl is `transformer_engine` if without Transformer Engine: (Transformer Engine)
    | give {transformer_impl:local}
transformer_impl is other than `local` or `transformer_engine`: its kernels need a GPU
    | give {transformer_impl:local}
fp8_recipe is other than `tensorwise`, `delayed` or `custom` if `fp8` and with Transformer Engine:
    its kernels need a GPU | give {fp8_recipe:tensorwise}
attention_backend is `flash` or `fused`: its kernels need a GPU | give {attention_backend:auto}
context_parallel_size is above 1 if no attention of its own: the kernels of Megatron's own attention
    over a split sequence need a GPU | give {context_parallel_size:1}, or {spec} with an attention
    that can

effect: ignored
# every schedule
defer_embedding_wgrad_compute: the schedule places all W passes
# W passes
delay_wgrad_compute: the schedule places all W passes

effect: barrier
# post-validation and asynchronous schedules
exit_duration_in_mins: ranks agree on the time in each iteration | leave the end to the job
    scheduler
exit_signal_handler: ranks tell each other of signals in each iteration | save often instead
log_params_norm: the norm is summed over all ranks in each iteration | drop {}
calculate_per_token_loss: the last stage tells all others how many tokens it counted in each
    iteration | average by microbatch
num_experts: logged losses of routers are summed over all ranks in each iteration | none so far
async_save: ranks ask each other whether a save has ended in each iteration | none while one runs
rerun_mode is other than `disabled`: ranks agree in each iteration on whether it is to be run again
    | {rerun_mode:disabled}
untie_embeddings_and_output_weights is off if both ends on two ranks: first and last rank
    sum the gradients of their copies of the embedding | untie them, or use a schedule with a V
mtp_num_layers if both ends on two ranks: first and last rank sum the gradients of their
    copies of the embedding | use a schedule with a V
log_interval is 1: each line gathers the timers of all ranks | {log_interval:10} or more
timing_log_level if `barrier_with_L1_time`: timers wait for all ranks | {barrier_with_L1_time:off}

effect: the optimizer waits
# post-validation
optimizer_cpu_offload: the host steps in its own time
optimizer_cuda_graph: a captured step steps what it was captured with
overlap_param_gather_with_optimizer_step: parameters are gathered amid the step
reuse_grad_buf_for_mxfp8_param_ag: parameters and gradients share a buffer
main_params_dtype, exp_avg_dtype, exp_avg_sq_dtype is other than fp32 and bf16 if
    `use_precision_aware_optimizer`: the optimizer keeps scales of that state to itself
use_megatron_fsdp: parameters are gathered amid the step
fp8_param_gather: weights are quantized anew amid the step
effect: the model waits
fp8_recipe is `delayed` if `fp8`: forwards that are dropped would leave their scales
effect: the loop waits
save_activations_interval, save_tokens_per_expert_interval, save_dgrads_interval,
    log_max_attention_logit, qk_clip, moe_routing_trace_path: it takes all forwards of an iteration
    to run when Megatron asks for them
rerun_mode is other than `disabled`: an iteration runs again from where its data and random states
    were noted, and forwards would have begun before that | give {rerun_mode:disabled}
""".replace('(overlapped)', '\n'.join(_OVERLAPPED)).replace('(in a loop)', ' | '.join(IN_A_LOOP))
    )
)
REFUSALS, SUPERSEDED, BARRIERS, WAITS_BY_OPTIMIZER, WAITS_BY_MODEL, WAITS_BY_LOOP = (
    tuple(group) for _, group in itertools.groupby(RULES, key=lambda rule: rule.effect)
)


def settings(rules: Iterable[Rule] = REFUSALS) -> tuple[str, ...]:
    """Return the names of all of Megatron's settings that rules are about."""
    named = (name for rule in rules for name in rule.settings)
    return tuple(dict.fromkeys(name for name in named if name.islower() and '.' not in name))
