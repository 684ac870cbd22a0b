"""Stages without layers in a layout: NVIDIA's loop trains them as by Megatron's own schedule."""

from __future__ import annotations

from dataclasses import replace

from grids import grid
from nvidia import needs_training, run
from supported import supports

pytestmark = needs_training
FLAGS = """--untie-embeddings-and-output-weights --position-embedding-type rope
    --clip-grad 1e9 --global-batch-size 6 --train-iters 3 --num-layers 4""".split()


@supports('stages without layers in a layout', '{schedule}')
@grid(
    layout=('E|tttt||L', 'Ett||tt|L'),
    schedule=('zb-h1', '1f1b', 'zb-v', 'interleaved'),
)
def test_identical_to_megatron(ranks, layout, schedule):
    """On a rank each, or two on a rank, by Megatron's interleaved schedule."""
    p = 2 if schedule in ('zb-v', 'interleaved') else 4
    flags = [*FLAGS, '--pipeline-model-parallel-size', p]
    flags += ['--pipeline-model-parallel-layout', layout]
    stock = run(ranks(p), *flags)
    assert len(set(stock.losses.values())) == 3
    ours = run(ranks(p), *flags, '--pipeline-schedule', schedule)
    assert replace(ours, grad_norms=stock.grad_norms) == stock
    assert ours.grad_norms == stock.grad_norms or schedule == 'zb-v', 'summed in another order'
