"""Multi-token prediction in NVIDIA's training loop: to the bit as by Megatron's own schedule."""

from __future__ import annotations

from grids import grid
from nvidia import needs_training, run, since

pytestmark = needs_training

MTP = """--untie-embeddings-and-output-weights --position-embedding-type rope
    --clip-grad 1e9 --global-batch-size 6 --train-iters 3""".split()


@grid(depth=(1, 2), p=(2, 4), schedule=('zb-h1', 'zb-v', 'dualpipe-v', 'interleaved', 'auto'))
def test_identical_to_megatron(ranks, tmp_path, depth, p, schedule):
    """From a checkpoint that Megatron's own 1F1B saved; its layout is that of one chunk a rank."""
    flags = [*MTP, '--num-layers', 2 * p, '--pipeline-model-parallel-size', p, '--mtp-num-layers', depth]
    stock = run(ranks(p), *flags, '--save', tmp_path, '--save-interval', 1)
    loading = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', schedule]
    ours = run(ranks(p), *flags, *loading)
    assert len(stock.losses) == 3
    assert {'mtp', 'embedding'} <= stock.parameters.keys() == ours.parameters.keys()
    assert ours.losses == since(1, stock.losses)
    assert ours.parameters == stock.parameters
    assert ours.optimizer == stock.optimizer
