"""NVIDIA's scripts of hybrid models, unedited; they are in a checkout, which MEGATRON_LM names."""

from __future__ import annotations

import sys

import commands
import pytest
from grids import grid
from nvidia import CHECKOUT, COMMON, known, run, since
from supported import TOLERANCE, absent, refuses, supports
from test_hybrid import PATTERNS, SPEC, TE
from test_hybrid import segments as divided_among
from test_launch import NO_CLIPPING
from test_other_scripts import script
from test_sliced_models import UNTIED
from test_vocabulary_hybrid import FP32
from test_vocabulary_loop import FLAG, near

pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif(not CHECKOUT, reason='needs a checkout: MEGATRON_LM names it'),
]
PIPELINE = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 6, '--train-iters', 3]
SEGMENTS = '--hybrid-layer-pattern'
MAMBA = ['--spec', 'megatron.core.models.mamba.mamba_layer_specs', 'mamba_stack_spec']


@pytest.fixture
def segments(te_ranks):
    """Skips where hybrid models have one chunk a rank."""
    if SEGMENTS not in te_ranks(2).run(known)[0]:
        absent('hybrid models have segments from 0.17 on')


@supports('`{named}`: {case}')
@grid(
    named=('pretrain_hybrid.py', 'pretrain_mamba.py'),
    case=tuple(PATTERNS),
    schedule=('zb-v', 'zb-h1', 'interleaved'),
)
def test_unedited(te_ranks, segments, tmp_path, named, case, schedule):
    """From a checkpoint of Megatron's own 1F1B, each goes on as Megatron does."""
    path = script(named)
    pattern, *more = PATTERNS[case]
    flags = [*SPEC, *TE, *NO_CLIPPING, *more, *PIPELINE, SEGMENTS]
    saving = ['--save', tmp_path, '--save-interval', 1]
    stock = run(te_ranks(2), *flags, divided_among(pattern, 2), *saving, script=path)
    loading = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', schedule]
    ours = run(te_ranks(2), *flags, pattern, *loading, script=path)
    assert len(stock.losses) == 3
    assert ours.losses == since(1, stock.losses)
    assert ours.parameters == stock.parameters
    assert ours.optimizer == stock.optimizer


@supports('`pretrain_mamba.py` of one chunk a rank')
@pytest.mark.parametrize('schedule', ['zb-h1', '1f1b'])
def test_one_chunk_a_rank(te_ranks, schedule):
    """Until 0.16, where the pattern has no segments and Megatron divides it."""
    if SEGMENTS in te_ranks(2).run(known)[0]:
        absent('hybrid models have segments from 0.17 on')
    flags = [*MAMBA, *TE, *NO_CLIPPING, *PIPELINE, '--num-layers', 8]
    flags += ['--hybrid-override-pattern', '*-*-*-*-']
    stock = run(te_ranks(2), *flags, script=script('pretrain_mamba.py'))
    assert len(set(stock.losses.values())) == 3
    ours = run(
        te_ranks(2), *flags, '--pipeline-schedule', schedule, script=script('pretrain_mamba.py')
    )
    assert ours == stock


@supports('`pretrain_mamba.py` of one chunk a rank, {layers} on all ranks', outcome=TOLERANCE)
@pytest.mark.parametrize(
    ('layers', 'schedule'),
    [
        ('input+output, tied', 'zb-h1'),
        *(
            pytest.param(layers, schedule, marks=pytest.mark.full)
            for layers in ('output', 'input+output', 'input+output, tied')
            for schedule in ('zb-h1', '1f1b')
            if (layers, schedule) != ('input+output, tied', 'zb-h1')
        ),
    ],
)
def test_one_chunk_a_rank_with_shards(te_ranks, layers, schedule):
    """From scratch: weights begin as stock draws them."""
    if SEGMENTS in te_ranks(2).run(known)[0]:
        absent('hybrid models have segments from 0.17 on')
    layers, _, tied = layers.partition(', ')
    flags = [*MAMBA, *FP32, *NO_CLIPPING, *PIPELINE, '--num-layers', 8]
    flags += ['--hybrid-override-pattern', '*-*-*-*-', *([] if tied else UNTIED)]
    stock = run(te_ranks(2), *flags, script=script('pretrain_mamba.py'))
    flags += ['--pipeline-schedule', schedule, FLAG, layers]
    near(run(te_ranks(2), *flags, script=script('pretrain_mamba.py')), stock, 0)


@refuses('hybrid models on a CPU: `M`, `G` and `D`', 'their kernels need a GPU', 'zb-h1')
@pytest.mark.parametrize(
    'letter', ['M (Mamba)', 'G (Gated DeltaNet)', 'D (DeepSeek sparse attention)']
)
def test_layers_of_kernels_are_named(letter):
    """One line before anything is built."""
    words = [
        *COMMON,
        *SPEC,
        *PIPELINE,
        '--pipeline-schedule',
        'zb-h1',
        SEGMENTS,
        f'*-|*{letter[0]}',
    ]
    script_of = [
        sys.executable,
        '-m',
        'megatron_zbpp.launch',
        '--cpu',
        script('pretrain_hybrid.py'),
    ]
    done = commands.run([*script_of, *map(str, words)], env={'WORLD_SIZE': '2'}, timeout=200)
    assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
    said = f'kernels of {letter} need a GPU; have a pattern of other layers (*, -, E, +)'
    assert said in done.stderr.splitlines()[-1]
