"""Every schedule leaves what Megatron's own 1F1B leaves, to the bit."""

from __future__ import annotations

import pytest
from training import run

MICROBATCHES = (1, 2, 3, 4, 7, 8, 16)
NO_CLIPPING = 1e9  # the norm is computed all the same


@pytest.mark.parametrize('layers', ['even', 'uneven'])
@pytest.mark.parametrize('tied', [True, False], ids=['tied', 'untied'])
@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
@pytest.mark.parametrize('p', [2, 4])
def test_identical_to_megatron(ranks, data, tmp_path, p, precision, tied, layers):
    """Losses, parameters and Adam's state of 20 iterations, for every number of microbatches."""
    # uneven: does not divide, and a layer fewer beside embedding and loss
    shape = ['--num-layers', 2 * p if layers == 'even' else 2 * p + 1]
    if layers == 'uneven':
        shape += ['--account-for-embedding-in-pipeline-split']
        shape += ['--account-for-loss-in-pipeline-split']
    shape += [] if tied else ['--untie-embeddings-and-output-weights']
    shape += ['--bf16'] if precision == 'bf16' else []
    for m in MICROBATCHES:
        common = ['--pipeline-model-parallel-size', p, '--data-path', data, *shape]
        common += ['--global-batch-size', m, '--train-iters', 20]

        def trained(schedule, clip, common=common):
            options = ['--pipeline-schedule', schedule, '--clip-grad', clip]
            return run(ranks(p), tmp_path, *common, *options)

        reference = trained('megatron', NO_CLIPPING)
        assert len(set(reference.losses)) == 20 and len(reference.optimizer) > p
        vee = trained('zb-v', NO_CLIPPING)
        assert vee.losses == reference.losses, m
        assert vee.parameters == reference.parameters, m
        assert vee.optimizer == reference.optimizer, m
        clipped = trained('megatron', 0.5)
        assert clipped.parameters != reference.parameters, 'clipping must have been active'
        for schedule in ('1f1b', 'zb-h1'):
            assert trained(schedule, 0.5) == clipped, (schedule, m)
        vee = trained('zb-v', 0.5)
        for norm, expected in zip(vee.grad_norms, clipped.grad_norms, strict=True):
            # the first norms, before the last bits of the norm have moved the weights
            assert float.fromhex(norm) == pytest.approx(float.fromhex(expected), rel=1e-6), m
