"""Toys of the models that people train today, in NVIDIA's training loop: to the bit as by
Megatron's own schedule."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from grids import grid
from nvidia import known, needs_training, run, since
from ranks import Ranks
from supported import absent, supports
from test_auto import told
from test_launch import NO_CLIPPING
from test_launch_post_validation import EARLY
from wheels import skip_oldest

pytestmark = needs_training

NORMS = '--normalization RMSNorm --untie-embeddings-and-output-weights'.split()
BASE = [*NORMS, *'--swiglu --position-embedding-type rope --disable-bias-linear'.split()]
QUERY_GROUPS = ['--group-query-attention', '--num-query-groups', 2, '--kv-channels', 16]
EXPERTS = ['--moe-token-dispatcher-type', 'alltoall', '--moe-router-load-balancing-type']
# attention to what is projected on few channels; scores by a sigmoid and a bias that balances them;
# groups of experts, one expert that all tokens share, none in the first layers; two tokens at once
LATENT = """--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm
    --num-experts 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5
    --moe-aux-loss-coeff 1e-2 --mtp-num-layers 1""".split()
MANY = """--num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 4 --moe-aux-loss-coeff 1e-3
    --qk-layernorm""".split()
# every other layer attends to a window; a learnt share of attention goes nowhere
SINKS = """--window-size 4,0 --window-attn-skip-freq 2 --softmax-type learnable
    --position-embedding-type yarn --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2
    --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0""".split()
MODELS = {
    'DeepSeek-V3': [*BASE, *LATENT, *EXPERTS, 'seq_aux_loss'],
    'Qwen3 MoE': [*BASE, *QUERY_GROUPS, *MANY, *EXPERTS, 'global_aux_loss'],
    'Llama 3': [*BASE, *QUERY_GROUPS, '--use-rope-scaling', '--rotary-base', 500000],
    'GPT-OSS': [*NORMS, *QUERY_GROUPS, *SINKS, *EXPERTS, 'none'],
}
TE = ['--transformer-impl', 'transformer_engine', '--bf16', '--moe-grouped-gemm']


@supports('a toy of {model}')
@grid(model=('Qwen3 MoE', 'Llama 3', 'GPT-OSS'), schedule=('auto', 'zb-v'), p=(2, 4))
def test_identical_to_megatron(ranks, tmp_path, model, schedule, p):
    """Of Megatron's own layers, whose experts cannot have biases."""
    if model == 'GPT-OSS':
        needs_yarn(ranks(p))
    compare(ranks(p), tmp_path, p, [*MODELS[model], '--disable-bias-linear'], schedule)


def needs_yarn(ranks: Ranks) -> None:
    if '--position-embedding-type yarn' not in ranks.run(known)[0]:
        absent("NVIDIA's script has no flag for YaRN")


@pytest.mark.te
@supports('a toy of {model}, experts in one product')
@grid(model=('DeepSeek-V3', 'GPT-OSS'), schedule=('zb-v+post-validation', 'auto'))
@pytest.mark.parametrize('p', [2, pytest.param(4, marks=pytest.mark.full)])
def test_transformer_engine(request, te_ranks, tmp_path, model, schedule, p):
    """Of layers that only Transformer Engine has."""
    flags = [*MODELS[model], *TE]
    if model == 'GPT-OSS':
        needs_yarn(te_ranks(p))
        skip_oldest(request, 'does not initialise the share of attention that goes nowhere')
    if model == 'DeepSeek-V3':
        flags += ['--moe-layer-freq', f'[0]*{p // 2}+[1]*{2 * p - p // 2}']
    compare(te_ranks(p), tmp_path, p, flags, schedule)


def compare(ranks: Ranks, folder: Path, p: int, flags: list, schedule: str) -> None:
    """Goes on from a checkpoint of Megatron's own 1F1B, and leaves what it leaves.

    `auto` switches to what it has planned, whenever the planner answers: losses are the same.
    """
    name, _, early = schedule.partition('+')
    flags = [*flags, *NO_CLIPPING, '--pipeline-model-parallel-size', p, '--num-layers', 2 * p]
    flags += ['--global-batch-size', 6, '--train-iters', 7 if name == 'auto' else 5 if early else 3]
    stock = run(ranks, *flags, '--save', folder, '--save-interval', 1)
    assert len(set(stock.losses.values())) == len(stock.losses) >= 3
    ours = ['--load', folder, '--ckpt-step', 1, '--pipeline-schedule', name]
    ours += ['--pipeline-schedule-profile-iters', 1, *(EARLY if early else ())]
    found = run(ranks, *flags, *ours, event=partial(told, switching=True, seconds=2))
    assert found.losses == since(1, stock.losses)
    assert found.parameters == stock.parameters
    assert found.optimizer == stock.optimizer
    assert any('switches' in line for line in found.reported[0]) == (name == 'auto')
