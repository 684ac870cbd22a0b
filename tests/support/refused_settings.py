"""Rows of the table of rules: settings and schedules by which each holds, and what its cures do."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.job.rules import Context, Refusal, Rule, check
from megatron_zbpp.mcore.job.rules_table import CONDITIONS, REFUSALS

# settings and flags of some releases only: of which
OF_SOME = {
    'use_legacy_models': 'until 0.17',
    'overlap_dispatch_backward_with_experts_wgrad': 'from 0.18',
    'logits_load_dir': 'from 0.19',
    'moe_paged_stash': 'from 0.19',
    'moe_expert_rank_capacity_factor': 'from 0.19',
    'use_transformer_engine_op_fuser': 'from 0.17',
    'tensor_parallel_num_weight_shards': 'from 0.19',
    'expert_tensor_parallel_num_weight_shards': 'from 0.19',
    'moe_single_grouped_weight': 'from 0.18',
    'moe_single_grouped_bias': 'from 0.18',
    'moe_use_grouped_tensor': 'from 0.20',
    'hybrid_layer_pattern': 'from 0.17',
    'hybrid_attention_ratio': 'until 0.16',
    'hybrid_mlp_ratio': 'until 0.16',
    'modelopt_enabled': 'scripts add it',
    'export_kd_teacher_load': 'scripts add it',
}
OF_SOME |= {f'--{name.replace("_", "-")}': since for name, since in OF_SOME.items()}
VALUES = {  # that a row's condition on a value is true of
    '': 1,
    'off': False,
    'above 1': 2,
    '1': 1,
    'above 0': '1',
    'above tensor parallelism': '2',
    'above tensor parallelism of experts': 2,
    'delayed': 'delayed',
    'with `global_aux_loss`': ['aux_loss', 'global_aux_loss'],
    'counting tokens': ['aux_loss', 'quantile_balancing'],
    'counting, or unknown': ['global_aux_loss', 'of tomorrow'],
    'not by token': ['sinkhorn', 'aux_loss'],
    'other than fp32 and bf16': 'torch.float16',
    'of several passes': 'local',
    'with layers that have a state': 'M*|M-',
    'with `M`, `G` or `D`': 'M*|*-',
}
VEE, LOOP, LONG = Placement.v(2), Placement.loop(2), Placement.loop(4)
BASE = Context((), placement=LOOP, splits=False, joins=True, in_order=True)
TECHNIQUES = {
    'slices of sequences': 'sliced',
    'the output layer on all ranks': 'split_vocabulary',
    'asynchronous schedules': 'updating',
    **{
        f'{name} passes': name
        for name in ('recompute', 'offload', 'evict', 'split_vocabulary', 'split_embedding')
    },
}
# settings, and a schedule, of which a row's other conditions are true
WHERE: dict[str, dict[str, Any]] = {
    **{words: {'techniques': frozenset({name})} for words, name in TECHNIQUES.items()},
    'W passes': {'splits': True},
    'W passes or graphs that are not `local`': {'splits': True},
    'two-way schedules without mirror symmetry': {'mirrored': False},
    'all but `dualpipe-v`': {'joins': False},
    'chunks that run back in another order': {'in_order': False},
    'chunks of one layer': {
        'placement': LONG,
        'num_layers': 4,
        'offload_modules': ['core_attn', 'attn_proj'],
        'fine_grained_activation_offloading': True,
    },
    'seeds of dropout': {'seeded': True},
    'several chunks a rank': {'placement': VEE},
    'more than two ranks': {'placement': Placement.v(4)},
    'stages in no loop': {'placement': VEE},
    'more than two stages': {'placement': LONG},
    'hybrid models': {'hybrid_layer_pattern': '*|*|*|*'},
    'tied embeddings': {'untie_embeddings_and_output_weights': False},
    "Megatron's own attention": {'transformer_impl': 'local'},
    'on a CPU': {'on_cpu': True},
    'with Transformer Engine': {'with_te': True},
    'Megatron-Bridge': {'by_bridge': True},
}
# and of which conditions that are true of the cases anyway are not
ELSE: dict[str, dict[str, Any]] = {
    'the embedding on one': {'techniques': frozenset({'split_vocabulary', 'split_embedding'})},
    'two ranks': {'placement': Placement.v(4)},
    'both ends on two ranks': {'placement': VEE},
    'masks in batches': {'create_attention_mask_in_dataloader': False},
    'no attention of its own': {'spec': ['specs', 'context']},
    'Transformer Engine decides': {'moe_use_grouped_tensor': False},
    'without Transformer Engine': {'with_te': True},
}
HARMLESS = {  # values of which a row's condition is not true, beside what is not set
    'off': [True],
    'above 0': ['0', ''],
    'delayed': ['tensorwise', 'mxfp8'],
    'counting tokens': [None, 'none', 'aux_loss', ['seq_aux_loss', 'aux_loss'], 'sinkhorn'],
    'counting, or unknown': [None, 'none', 'sinkhorn', ['seq_aux_loss', 'global_aux_loss']],
    'not by token': [None, 'none', ['seq_aux_loss', 'aux_loss']],
    'other than fp32 and bf16': [None, 'torch.float32', 'torch.bfloat16'],
    'above tensor parallelism': [None, 0, 1, '1'],
    'above tensor parallelism of experts': [None, 0, 1],
    'above 1': [None, 0, 1],
    'with layers that have a state': [None, ''],
}
# words of cures that name no setting, and what they do
ONE_CHUNK, NO_TECHNIQUE = {'placement': LOOP}, {'techniques': frozenset()}
CURES: dict[str, dict[str, Any]] = {
    'leave it False': {'own': False},
    'give 1': {'own': 1},
    'pad microbatches': {'own': None},
    'recompute all microbatches alike': {'own': None},
    'drop --overlap-moe-expert-parallel-comm': {'own': None},
    'use {use_distributed_optimizer}': {'own': None},
    'for {offload}': {'own': None},
    'unset it': {'own': '0'},
    'give one of {offload_modules}': {'own': ['core_attn']},
    'have two layers or more': {'num_layers': 8},
    'have attention, MLP and experts': {'own': None},
    'have a pattern of other layers': {'own': '*-|*E'},
    'with one chunk a rank': ONE_CHUNK,
    'that has one, such as zb-h1': ONE_CHUNK,
    'that has, such as zb-h1': ONE_CHUNK,
    'have two stages in all': ONE_CHUNK,
    'have two pipeline ranks': {'placement': VEE},
    'take chimera': {'mirrored': True},
    'take dualpipe-v': {'joins': True},
    'take 1f1b, zb-h1': {'in_order': True},
    'a schedule without W passes': {'splits': False},
    'of whole sequences': NO_TECHNIQUE,
    'a synchronous schedule': NO_TECHNIQUE,
    'take a schedule without recompute': NO_TECHNIQUE,
    'take a schedule without offload': NO_TECHNIQUE,
    'take a schedule without evict': NO_TECHNIQUE,
    'leave out {vocab_parallel}': NO_TECHNIQUE,
    'leave out --pipeline-vocab-parallel': NO_TECHNIQUE,
    'give {vocab_parallel:input+output}': {
        'techniques': frozenset({'split_vocabulary', 'split_embedding'})
    },
    'or {untie_embeddings_and_output_weights}': {'own': True},
    'untie them': {'own': True},
    'leave out {dropout_seeds}': {'seeded': False},
    'or {spec}': {'spec': ['own', 'attention']},
    'a schedule with a V': {'placement': VEE},
    '{log_interval:10} or more': {'own': 10},
    # of barriers: what a user does without
    'leave the end to the job scheduler': {'own': None},
    'save often instead': {'own': None},
    'average by microbatch': {'own': False},
    'none so far': {'own': None},
    'none while one runs': {'own': None},
}
OURS = ('offload', 'vocab_parallel', 'dropout_seeds', 'use_distributed_optimizer')
_CURE = re.compile(r'(drop |give |use |^)\{(\w+)(?::([^}+]+))?\}')


class Case(NamedTuple):
    """A row's setting with a value, among others, and what else a rule asks of."""

    name: str
    values: dict[str, Any]
    context: Context

    def with_(self, changes: dict[str, Any]) -> Case:
        """Return the case after changes, of which `own` is the row's setting."""
        of_schedule = {k: v for k, v in changes.items() if hasattr(self.context, k)}
        own = {k: v for k, v in changes.items() if k not in of_schedule}
        own = {self.name if k == 'own' else k: v for k, v in own.items()}
        context = replace(self.context, **of_schedule)
        return self._replace(values=self.values | own, context=context)

    def said(self, *rules: Rule) -> list[Refusal]:
        """What rules say."""
        variables = {k: v for k, v in self.values.items() if k.isupper()}
        context = replace(self.context, sources=(SimpleNamespace(**self.values),))
        with mock.patch.dict(os.environ, variables):
            return list(check(context, rules))


def case_of(rule: Rule, name: str, but: str = '') -> Case:
    """A case in which the rule holds for a setting, on releases of which it is true.

    Args:
        rule: a row.
        name: of its setting.
        but: a condition that the case leaves out.
    """
    words, quoted = rule.value.text, re.findall('`(.+?)`', rule.value.text)
    value = VALUES[words] if words in VALUES else quoted[0]
    if words.startswith('other than') and words not in VALUES:
        value = 'another'
    case = Case(name, {name: value} | ({'fp8': 'hybrid'} if words == 'delayed' else {}), BASE)
    for each in conditions_of(rule):
        if each == but:
            continue
        quoted = re.findall('^`(.+)`$', each)
        case = case.with_(WHERE.get(each, dict.fromkeys(quoted, 1)))
    if but == 'several chunks a rank':
        return case.with_({'placement': Placement.loop(case.context.placement.num_ranks)})
    return case


def harmless(rule: Rule) -> list[Any]:
    """Values of a setting for which the rule does not hold."""
    words = rule.value.text
    others = re.findall('`(.+?)`', words) if words.startswith('other than') else []
    return [*HARMLESS.get(words, [None, False, 0]), *others]


def conditions_of(rule: Rule) -> list[str]:
    return rule.when.text.split(', ') if rule.when.text else []


def in_this_release(rule: Rule) -> bool:
    """Whether Megatron is of a release that the rule is about."""
    words = [each for each in conditions_of(rule) if re.search(r'\d\.\d', each)]
    return all(CONDITIONS[each](BASE) for each in words)


def cured(case: Case, rule: Rule) -> list[Case]:
    """The case after each cure that the rule names, done by itself."""
    found = [case.with_(change) for words, change in CURES.items() if words in rule.cure]
    for _, name, value in _CURE.findall(rule.cure):
        if name not in OURS:
            given = {'off': False, '': None}.get(value, int(value) if value.isdigit() else value)
            if not value and f'give {{{name}}}' in rule.cure:
                given = True
            more = {'cpu_offloading': None} if name.startswith('cpu_offloading') else {}
            found.append(case.with_({name: given} | more))
    return found


def refused(settings: Any, on_cpu: bool = False, techniques: Any = (), **how: Any) -> list[Refusal]:
    """What the whole table refuses, of settings, of a schedule with W passes in one order."""
    context = Context((settings,), on_cpu, techniques=frozenset(techniques), **how)
    return list(check(context, REFUSALS))
