"""Hybrid models with the output layer, and the embedding, on all ranks, in NVIDIA's loop."""

from __future__ import annotations

import functools

import pytest
from nvidia import SCRIPT, needs_training, run, since
from supported import TOLERANCE, absent, supports
from test_hybrid import PATTERNS, SPEC, model_of_a_pattern, segments
from test_launch import NO_CLIPPING
from test_sliced_models import UNTIED
from test_vocabulary_loop import FLAG, near
from test_vocabulary_training import BOTH, OUTPUT

pytestmark = [pytest.mark.te, needs_training]

FP32 = ['--transformer-impl', 'transformer_engine', '--position-embedding-type', 'rope']
RANKS, HOST = 2, '1f1b'
NVIDIAS = SCRIPT.with_name('pretrain_hybrid.py')  # in a checkout
TRAINED_BY = NVIDIAS if NVIDIAS.exists() else SCRIPT


@pytest.fixture(scope='module')
def trained(te_ranks, tmp_path_factory):
    """`trained(case, tied, schedule, layers)`: stock's three iterations, or two from the first."""

    if te_ranks(RANKS).run(model_of_a_pattern)[0] is None:
        absent('from 0.18 on')

    def of_case(case, tied):
        pattern, *more = PATTERNS[case]
        flags = [*FP32, *NO_CLIPPING, *more, '--global-batch-size', 4, '--train-iters', 3]
        flags += ['--num-layers', 8, '--pipeline-model-parallel-size', RANKS]
        flags += [] if tied else UNTIED
        return [*SPEC, *flags, '--hybrid-layer-pattern'], pattern

    @functools.cache
    def stock(case, tied):
        folder = tmp_path_factory.mktemp('stock')
        flags, pattern = of_case(case, tied)
        saving = ['--save', folder, '--save-interval', 1]
        divided = segments(pattern, RANKS)
        return run(te_ranks(RANKS), *flags, divided, *saving, script=TRAINED_BY), folder

    @functools.cache
    def made(case, tied, schedule=None, layers=OUTPUT):
        expected, folder = stock(case, tied)
        if schedule is None:
            return expected
        flags, pattern = of_case(case, tied)
        asked = ['--pipeline-schedule', schedule, FLAG, layers]
        loading = ['--load', folder, '--ckpt-step', 1]
        return run(te_ranks(RANKS), *flags, pattern, *asked, *loading, script=TRAINED_BY)

    return made


@supports("NVIDIA's loop: {layers} on all ranks, hybrid model, {case}", outcome=TOLERANCE)
@pytest.mark.parametrize(
    ('layers', 'schedule', 'case'),
    [
        (OUTPUT, 'zb-v', 'experts'),
        (f'{BOTH}, tied', 'zb-v', 'attention and MLP'),
        *(
            pytest.param(layers, schedule, case, marks=pytest.mark.full)
            for layers in (OUTPUT, BOTH, f'{BOTH}, tied')
            for schedule in ('zb-h1', 'interleaved', 'zb-v')
            for case in ('experts', 'attention and MLP')
            if (layers, schedule, case)
            not in [
                (OUTPUT, 'zb-v', 'experts'),
                (f'{BOTH}, tied', 'zb-v', 'attention and MLP'),
            ]
        ),
    ],
)
def test_close_to_stock(trained, layers, schedule, case):
    """From a checkpoint of Megatron's own 1F1B, in fp32; all schedules are alike to the bit."""
    layers, _, tied = layers.partition(', ')
    found = trained(case, bool(tied), schedule, layers)
    near(found, trained(case, bool(tied)), 1)
    assert len(since(1, found.losses)) == 2
    alike = trained(case, bool(tied), HOST, layers)
    for name in ('losses', 'parameters', 'optimizer'):
        assert getattr(found, name) == getattr(alike, name), name
