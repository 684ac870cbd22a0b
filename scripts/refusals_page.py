"""Writes the table of refused settings into docs/limits.md: the rules, and what was tried.

python scripts/refusals_page.py
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_zbpp.mcore.job.rules import REFUSALS, Rule

PAGE = Path(__file__).parents[1] / 'docs' / 'limits.md'
HEAD = '| setting | refused with | why | what was tried |\n|---|---|---|---|\n'
UNTRIED = '\nNot tried, by what they are refused with:\n\n'
_TABLE = re.compile(rf'{re.escape(HEAD)}(\|.*\n)*({re.escape(UNTRIED)}(- .*\n)*)?')
_GRAPHS = 'nothing: needs a GPU. Untried, `local` ones are accepted without W passes'
_SHARDED = 'read (0.19.0, main). Without W passes it is accepted, untried'
_GROUPED = 'run on its classes (2.20.2). Without W passes it is accepted, untried'
# how a condition begins, the settings (none: all that are left), what was tried with them
TRIED: tuple[tuple[str, str, str], ...] = (
    (
        'two-way',
        '',
        'proven: programs of `gems` deadlock by the rules of every backend; the other two-way '
        'schedules were run with overlapped reductions and gathers',
    ),
    (
        'slices',
        'apply_rope_fusion',
        'multi-latent attention without fused positions was run: within 1e-6 of whole sequences',
    ),
    (
        'slices',
        'moe_router_load_balancing_type',
        'quantile balancing trained another model before it was refused',
    ),
    ('slices', '', 'not tried'),
    (
        'the output layer',
        'untie_embeddings_and_output_weights',
        'run: refused where the model is built, too',
    ),
    ('the output layer', '', 'not tried'),
    *((f'{name} passes', '', 'not tried') for name in ('recompute', 'offload', 'evict')),
    ('split_', '', 'not tried'),
    ('asynchronous', '', 'not tried'),
    ('seeds', '', 'not tried'),
    ('Megatron-Bridge', '', 'read'),
    (
        'on a CPU',
        'hybrid_layer_pattern',
        'nothing: see [hybrid models](models-and-loops.md#hybrid-models)',
    ),
    (
        '',
        'use_megatron_fsdp',
        'run on 4 ranks in two pipelines (0.16.1, 0.19.2, main): Megatron itself fails',
    ),
    ('', 'use_torch_fsdp2', 'read (0.19.0, main): an assertion'),
    (
        '',
        'hybrid_context_parallel',
        'read (0.16.1, 0.19.0, main): an assertion',
    ),
    (
        '',
        'cpu_offloading cpu_offloading_num_layers',
        'read (0.16.1, 0.19.0): an error; `--pipeline-offload` runs instead',
    ),
    (
        '',
        'fine_grained_activation_offloading offload_modules',
        'run with one chunk a rank and with `interleaved`: to the bit; '
        '[where not](does-not-fit.md#megatrons-own-offloading)',
    ),
    (
        '',
        'num_microbatches_with_partial_activation_checkpoints',
        'read: no flag sets it; `--pipeline-recompute N` recomputes chunks instead',
    ),
    ('', 'external_cuda_graph enable_cuda_graph cuda_graph_impl', _GRAPHS),
    (
        '',
        'tp_comm_overlap',
        'read (2.8.0, 2.20.2): an assertion. Without W passes it is accepted, untried',
    ),
    ('', 'tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards', _SHARDED),
    (
        '',
        'moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias '
        'NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM',
        _GROUPED,
    ),
    (
        '',
        'overlap_dispatch_backward_with_experts_wgrad',
        'run without W passes: to the bit',
    ),
    ('', 'overlap_moe_expert_parallel_comm', 'run with `dualpipe-v`: to the bit'),
    (
        '',
        'use_transformer_engine_op_fuser',
        'read (2.20.2): only its grouped experts can delay. Untried without W passes',
    ),
    ('', 'moe_paged_stash', "nothing: its kernels are Triton's, which need a GPU"),
    ('', 'use_legacy_models', 'not tried: the flag is gone from 0.17 on'),
    (
        'tied embeddings',
        'mtp_num_layers',
        "run by Megatron's own schedule (0.19): saving fails, two output layers have one key",
    ),
    (
        'stages in no loop',
        '',
        'run: with one chunk a rank it is built as planned; from 0.17 on `HybridModel` trains in '
        'every placement',
    ),
    (
        '',
        'sft',
        'read (0.16.1, 0.17.1, 0.18.2). From 0.19 on it runs: to the bit',
    ),
    (
        '',
        'reset_attention_mask',
        'run on two ranks, or with one chunk a rank: to the bit of 1F1B',
    ),
    (
        '',
        'modelopt_enabled export_kd_teacher_load',
        "read (0.16.1 to main): Megatron's builder refuses a `vp_stage`",
    ),
    (
        '',
        'perform_rl_step',
        'run (0.19.1): `None is not a callable object` once the model was built',
    ),
)


def tried(rule: Rule) -> str:
    """Return what was tried of a rule; empty: another part of the page says it."""
    for begin, names, text in TRIED:
        if rule.when.text.startswith(begin) and (not names or rule.settings[0] in names.split()):
            return text
    assert rule.when.text.startswith('on a CPU'), rule
    return ''


def groups() -> dict[tuple[str, str], dict[str, str]]:
    """Return settings by reason, of each condition and what was tried."""
    found: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for rule in REFUSALS:
        if text := tried(rule):
            why = 'its kernels need a GPU' if callable(rule.reason) else rule.reason
            named = found[rule.when.text or 'every schedule', text]
            names = ', '.join(f'`{name}`' for name in rule.settings)
            names = f'{names} {rule.value.text}'.strip()
            named[why] = f'{named[why]}, {names}' if why in named else names
    return found


def page() -> str:
    """Return the page with table and list as the rules give them."""
    rows, untried = HEAD, UNTRIED
    for (where, text), reasons in groups().items():
        if text == 'not tried':
            untried += f'- {where}: {"; ".join(f"{n} ({why})" for why, n in reasons.items())}\n'
        else:
            rows += ''.join(f'| {n} | {where} | {why} | {text} |\n' for why, n in reasons.items())
    return _TABLE.sub(lambda _: rows + untried, PAGE.read_text(), count=1)


if __name__ == '__main__':
    PAGE.write_text(page())
