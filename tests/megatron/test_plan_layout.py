"""A plan of `zbpp partition` brings its layout: NVIDIA's script needs no flag but the file."""

from __future__ import annotations

import json

from nvidia import needs_training, run, since

from megatron_zbpp import Layer, Layers, Placement, partition

HEAVY_HEAD = Layers((Layer('E', 1, 0, 1), *[Layer('t', 2, 2, 2)] * 4, Layer('L', 6, 6, 6)))


COMMON = '--pipeline-model-parallel-size 2 --global-batch-size 4 --train-iters 4'.split()
COMMON += '--clip-grad 1e9 --untie-embeddings-and-output-weights'.split()


def plan(folder, placement: Placement) -> tuple[list, str]:
    """Our flags, and the layout that they bring."""
    found = partition(HEAVY_HEAD, 2, 4, placements=[placement], seconds=1)
    file = folder / 'plan.json'
    file.write_text(json.dumps(found.facts()))
    return ['--pipeline-schedule-file', file], found.layout


@needs_training
def test_trains_as_stock_of_the_same_layout(ranks, tmp_path):
    """To the bit; and stock Megatron, its layers evenly divided, goes on from a checkpoint."""
    flags, layout = plan(tmp_path, Placement.loop(2))
    assert layout == 'Ettt|tL'
    stock = run(ranks(2), *COMMON, '--pipeline-model-parallel-layout', layout)
    ours = run(ranks(2), *COMMON, *flags, '--save', tmp_path, '--save-interval', 2)
    assert ours.losses == stock.losses
    assert ours.parameters == stock.parameters
    assert ours.optimizer == stock.optimizer
    resumed = run(ranks(2), *COMMON, '--load', tmp_path, '--ckpt-step', 2)
    assert resumed.losses == since(2, stock.losses)
    assert resumed.parameters == stock.parameters


@needs_training
def test_goes_on_from_a_checkpoint_of_stock(ranks, tmp_path):
    """In a V, whose ranks have other layers."""
    flags, _ = plan(tmp_path, Placement.v(2))
    stock = run(ranks(2), *COMMON, '--save', tmp_path, '--save-interval', 2)
    ours = run(ranks(2), *COMMON, *flags, '--load', tmp_path, '--ckpt-step', 2)
    assert ours.losses == since(2, stock.losses)
    assert ours.parameters == stock.parameters
    assert ours.optimizer == stock.optimizer
