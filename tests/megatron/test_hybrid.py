"""Hybrid models in NVIDIA's training loop: attention, MLP, experts, and predictions of more tokens.

Mamba layers need kernels of a GPU; what places them is the same for all layers.
"""

from __future__ import annotations

import math

import pytest
from grids import grid
from nvidia import known, needs_training, run, since
from supported import TOLERANCE, absent, supports
from test_launch import MOE, NO_CLIPPING
from test_same_start import P2, require_same_start

pytestmark = [pytest.mark.te, needs_training]

SPEC = ['--spec', 'megatron.core.models.hybrid.hybrid_layer_specs', 'hybrid_stack_spec']
TE = ['--transformer-impl', 'transformer_engine', '--bf16', '--position-embedding-type', 'rope']
PATTERNS = {
    'attention and MLP': ['*-*-*-*-'],
    'experts': ['*E*E*E*E', *MOE, '--disable-bias-linear'],
    'more tokens': ['*-*-*-*-/*-', '--untie-embeddings-and-output-weights'],
}


@pytest.fixture(scope='module')
def knows_segments(te_ranks):
    """Skips where hybrid models have another name and one chunk a rank."""
    if '--hybrid-layer-pattern' not in te_ranks(2).run(known)[0]:
        absent('hybrid models have segments from 0.17 on')


@supports('HybridModel: {case}')
@grid(
    schedule=('zb-v', 'zb-h1', 'zb-interleaved', 'dualpipe-v'), case=tuple(PATTERNS), p=(2, 4, 2, 2)
)
def test_identical_to_megatron(te_ranks, knows_segments, tmp_path, schedule, case, p):
    """From a checkpoint of Megatron's own 1F1B; the pattern is divided for the schedule."""
    pattern, *more = PATTERNS[case]
    main, slash, rest = pattern.partition('/')
    pattern = main * (p // 2) + slash + rest  # each rank has experts: see docs/limits.md
    flags = [*SPEC, *TE, *NO_CLIPPING, *more, '--global-batch-size', 6, '--train-iters', 3]
    flags += ['--num-layers', 4 * p, '--pipeline-model-parallel-size', p]
    divided = segments(pattern, p)
    stock = run(
        te_ranks(p), *flags, '--hybrid-layer-pattern', divided,
        '--save', tmp_path, '--save-interval', 1,
    )  # fmt: skip
    ours = run(
        te_ranks(p), *flags, '--hybrid-layer-pattern', divided if schedule == 'zb-h1' else pattern,
        '--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', schedule,
    )  # fmt: skip
    assert len(stock.losses) == 3
    assert ours.losses == since(1, stock.losses)
    assert ours.parameters == stock.parameters
    assert ours.optimizer == stock.optimizer


@supports('training from scratch, the same start: HybridModel', 'zb-v')
@pytest.mark.full
def test_from_scratch(te_ranks, knows_segments):
    pattern, *more = PATTERNS['more tokens']
    flags = [*SPEC, *TE, *more, *P2, '--num-layers', 8, '--hybrid-layer-pattern']
    require_same_start(te_ranks(2), [*flags, segments(pattern, 2)], segments=pattern)


@supports('HybridModel in slices of sequences: attention, MLP and experts', outcome=TOLERANCE)
@pytest.mark.parametrize('schedule', ['zb-v'])
def test_in_slices(te_ranks, knows_segments, tmp_path, schedule):
    if te_ranks(2).run(model_of_a_pattern)[0] is None:
        absent('from 0.18 on')
    pattern, more = '*-*E*-*E', PATTERNS['experts'][1:]
    flags = [*SPEC, *TE, *NO_CLIPPING, *more, '--global-batch-size', 4, '--train-iters', 3]
    flags += ['--num-layers', 8, '--pipeline-model-parallel-size', 2]
    stock = run(
        te_ranks(2), *flags, '--hybrid-layer-pattern', segments(pattern, 2),
        '--save', tmp_path, '--save-interval', 1,
    )  # fmt: skip
    ours = run(
        te_ranks(2), *flags, '--hybrid-layer-pattern', pattern, '--pipeline-slices', 4,
        '--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', schedule,
    )  # fmt: skip
    for iteration, (loss, *_) in since(1, stock.losses).items():
        found = float.fromhex(ours.losses[iteration][0])
        assert math.isclose(found, float.fromhex(loss), rel_tol=1e-3)  # in bf16


def model_of_a_pattern():
    from megatron_zbpp.mcore import compat

    return compat.hybrid_model()


def segments(pattern: str, stages: int) -> str:
    """The same with segments of equal length."""
    main, slash, rest = pattern.partition('/')
    each = len(main) // stages
    return '|'.join(main[i : i + each] for i in range(0, len(main), each)) + slash + rest
