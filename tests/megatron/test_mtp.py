"""Multi-token prediction in NVIDIA's training loop: to the bit as by Megatron's own schedule."""

from __future__ import annotations

import events
import pytest
from grids import grid
from nvidia import needs_training, run, since
from ranks import RankError
from supported import refuses, supports

pytestmark = needs_training

MTP = """--untie-embeddings-and-output-weights --position-embedding-type rope
    --clip-grad 1e9 --global-batch-size 6 --train-iters 3""".split()


@supports('multi-token prediction, depth {depth}')
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


@supports('multi-token prediction, depth 2', '{schedule}+post-validation')
@pytest.mark.parametrize('schedule', ['zb-2p', 'zb-v'])
def test_post_validation(ranks, tmp_path, schedule):
    """Losses of forwards that ran ahead are logged with their own iteration."""
    flags = [*MTP, '--num-layers', 4, '--mtp-num-layers', 2, '--pipeline-model-parallel-size', 2]
    flags += ['--train-iters', 5]
    saving = ['--save', tmp_path, '--save-interval', 1]
    stock = run(ranks(2), *flags, *saving, event=events.mtp_losses)
    early = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 1]
    loading = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', schedule]
    ours = run(ranks(2), *flags, *loading, *early, event=events.mtp_losses)
    assert ours.losses == since(1, stock.losses)
    assert ours.parameters == stock.parameters
    assert ours.reported[-1] == stock.reported[-1][1:]
    assert len({tuple(losses) for losses in stock.reported[-1]}) == 5, 'of the rank that has them'


@supports('multi-token prediction in a stage of its own, depth {depth}', 'zb-h1')
@pytest.mark.parametrize('depth', [1, 2])
def test_a_stage_of_its_own(ranks, depth):
    """Its message to the stage of the loss is longer than all others."""
    layout = ['--pipeline-model-parallel-layout', f'Etttt|tttt|{"m" * depth}|L', '--num-layers', 8]
    flags = [*MTP, *layout, '--pipeline-model-parallel-size', 4, '--mtp-num-layers', depth]
    stock = run(ranks(4), *flags)
    assert len(set(stock.losses.values())) == 3
    assert run(ranks(4), *flags, '--pipeline-schedule', 'zb-h1') == stock


@refuses(
    'multi-token prediction in a stage of its own',
    'it must come before the stage of the loss',
    'zb-v',
)
def test_a_stage_of_its_own_needs_a_loop(ranks):
    layout = ['--pipeline-model-parallel-layout', 'Ett|tt|m|L', '--num-layers', 4]
    flags = [*MTP, *layout, '--pipeline-model-parallel-size', 2, '--mtp-num-layers', 1]
    with pytest.raises(RankError, match='before the stage of the loss'):
        run(ranks(2), *flags, '--pipeline-schedule', 'zb-v')
