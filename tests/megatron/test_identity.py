"""Every schedule leaves what Megatron's own 1F1B leaves, to the bit."""

from __future__ import annotations

import pytest
from example import run
from grids import grid
from supported import TOLERANCE, supports

MICROBATCHES = (1, 2, 3, 4, 7, 8, 16)
ITERATIONS = 4
CLIPPING, NO_CLIPPING = 0.5, 1e9  # the norm is computed all the same


@supports('GPT, {precision}', '1f1b zb-h1 zb-v')
@grid(m=MICROBATCHES, p=(2, 2, 4, 4, 2, 4, 2), precision=('fp32', 'bf16', 'bf16', 'fp32'))
def test_identical_to_megatron(ranks, data, m, p, precision):
    """Losses, parameters and Adam's state, for every number of microbatches.

    Tied and untied embeddings take turns, the other way round for bf16 as for fp32; even and uneven
    layers, the other way round for p = 4 as for p = 2. So in a full run each number of microbatches
    is tried with each of all these.
    """
    index = MICROBATCHES.index(m)
    tied = index % 2 == (precision == 'bf16')
    if index % 2 == (p == 4):
        shape = ['--num-layers', 2 * p]
    else:  # does not divide, and a layer fewer beside embedding and loss
        shape = ['--num-layers', 2 * p - 1, '--account-for-embedding-in-pipeline-split']
        shape += ['--account-for-loss-in-pipeline-split']
    shape += [] if tied else ['--untie-embeddings-and-output-weights']
    shape += ['--bf16'] if precision == 'bf16' else []
    common = ['--pipeline-model-parallel-size', p, '--data-path', data, *shape]
    common += ['--global-batch-size', m, '--train-iters', ITERATIONS]

    def trained(schedule, clip):
        options = ['--pipeline-schedule', schedule, '--clip-grad', clip]
        return run(ranks(p), *common, *options)

    clipped = trained('megatron', CLIPPING)
    assert len(set(clipped.losses)) == ITERATIONS and len(clipped.optimizer) > p
    for schedule in ('1f1b', 'zb-h1'):
        assert trained(schedule, CLIPPING) == clipped, schedule
    reference = trained('megatron', NO_CLIPPING)
    assert clipped.parameters != reference.parameters, 'clipping must have been active'
    vee = trained('zb-v', NO_CLIPPING)
    assert vee.losses == reference.losses
    assert vee.parameters == reference.parameters
    assert vee.optimizer == reference.optimizer


@supports('clipping of gradients: the norm is summed in another order', 'zb-v', TOLERANCE)
@pytest.mark.parametrize('p', [2, 4])
def test_clipping_of_another_order(ranks, data, p):
    """ZB-V sums the gradient norm in another order: its clipping differs in the last bits only."""
    common = ['--pipeline-model-parallel-size', p, '--num-layers', 2 * p, '--data-path', data]
    common += ['--global-batch-size', 8, '--train-iters', ITERATIONS, '--clip-grad', CLIPPING]
    reference = run(ranks(p), *common, '--pipeline-schedule', 'megatron')
    vee = run(ranks(p), *common, '--pipeline-schedule', 'zb-v')
    for exact in ('losses', 'grad_norms'):
        values, expected = (list(map(float.fromhex, getattr(r, exact))) for r in (vee, reference))
        assert values == pytest.approx(expected, rel=1e-6), exact
