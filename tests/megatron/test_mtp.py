"""Multi-token prediction in NVIDIA's training loop: to the bit as by Megatron's own schedule."""

from __future__ import annotations

import pytest
from grids import grid
from nvidia import needs_training, run, since
from ranks import RankError

pytestmark = needs_training

MTP = """--untie-embeddings-and-output-weights --position-embedding-type rope
    --clip-grad 1e9 --global-batch-size 6 --train-iters 3""".split()


@grid(depth=(1, 2), p=(2, 4), schedule=('zb-h1', 'zb-v', 'dualpipe-v', 'interleaved', 'auto'))
def test_identical_to_megatron(ranks, tmp_path, depth, p, schedule):
    """From a checkpoint that Megatron's own 1F1B saved; its layout is that of one chunk a rank."""
    flags = [
        *MTP,
        '--num-layers',
        2 * p,
        '--pipeline-model-parallel-size',
        p,
        '--mtp-num-layers',
        depth,
    ]
    stock = run(ranks(p), *flags, '--save', tmp_path, '--save-interval', 1)
    loading = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', schedule]
    ours = run(ranks(p), *flags, *loading)
    assert len(stock.losses) == 3
    assert {'mtp', 'embedding'} <= stock.parameters.keys() == ours.parameters.keys()
    assert ours.losses == since(1, stock.losses)
    assert ours.parameters == stock.parameters
    assert ours.optimizer == stock.optimizer


def test_a_stage_of_its_own(ranks):
    """Its message to the stage of the loss is longer than all others."""
    layout = ['--pipeline-model-parallel-layout', 'Etttt|tttt|m|L', '--num-layers', 8]
    flags = [*MTP, *layout, '--pipeline-model-parallel-size', 4, '--mtp-num-layers', 1]
    stock = run(ranks(4), *flags)
    assert len(set(stock.losses.values())) == 3
    assert run(ranks(4), *flags, '--pipeline-schedule', 'zb-h1') == stock


def test_a_stage_of_its_own_needs_a_loop(ranks):
    layout = ['--pipeline-model-parallel-layout', 'Ett|tt|m|L', '--num-layers', 4]
    flags = [*MTP, *layout, '--pipeline-model-parallel-size', 2, '--mtp-num-layers', 1]
    with pytest.raises(RankError, match='before the stage of the loss'):
        run(ranks(2), *flags, '--pipeline-schedule', 'zb-v')
