"""Stages without layers in a layout: NVIDIA's loop trains them as by Megatron's own schedule."""

from __future__ import annotations

from grids import grid
from nvidia import needs_training, run
from supported import supports

pytestmark = needs_training
FLAGS = """--untie-embeddings-and-output-weights --position-embedding-type rope
    --clip-grad 1e9 --global-batch-size 6 --train-iters 3 --num-layers 4""".split()


@supports('stages without layers in a layout', '{schedule}')
@grid(layout=('E|tttt||L', 'Ett||tt|L'), schedule=('zb-h1', '1f1b'))
def test_identical_to_megatron(ranks, layout, schedule):
    flags = [*FLAGS, '--pipeline-model-parallel-size', 4]
    flags += ['--pipeline-model-parallel-layout', layout]
    stock = run(ranks(4), *flags)
    assert len(set(stock.losses.values())) == 3
    assert run(ranks(4), *flags, '--pipeline-schedule', schedule) == stock
