"""A model whose layers are elsewhere than the schedule's stages never begins to train."""

from __future__ import annotations

import pytest


def compared(built, schedule='zb-v'):
    """What is said where ranks have built these layers, a list for each stage."""
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist

    from megatron_zbpp.mcore.iteration.built import require_all_layers
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.settings import Settings

    placement = Programs(Settings(schedule)).placement(2)

    def model(numbers):
        layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in numbers)
        for layer, number in zip(layers, numbers, strict=True):
            layer.layer_number = number
        mtp = torch.nn.Module()
        mtp.layers = torch.nn.ModuleList([torch.nn.Identity()])
        mtp.layers[0].layer_number = 1
        decoder = torch.nn.Module()
        decoder.layers = layers
        whole = torch.nn.Module()
        whole.decoder, whole.mtp = decoder, mtp
        return whole

    models = [model(built[stage]) for stage in placement.stages(dist.get_rank())]
    try:
        require_all_layers(models, placement, dist.group.WORLD, nullcontext)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    'built', [[[1], [2], [3], [4]], [[1, 2], [], [3], []], [[], [], [], []]], ids=str
)
def test_as_planned(ranks, built):
    assert ranks(2).run(compared, built) == [None, None]


@pytest.mark.parametrize(
    'built',
    [[[1], [3], [2], [4]], [[1], [2], [2], [3]], [[1], [2], [4], [5]], [[2], [3], [4], [5]]],
    ids=['a loop', 'twice', 'missing', 'the first'],
)
def test_another_model(ranks, built):
    for said in ranks(2).run(compared, built):
        assert said.startswith('the layers of decoder.layers were not built where the schedule has')
        assert f'by stage {built}' in said
        assert 'such as zb-h1' in said


def in_a_loop(built):
    """What is said of layers that have been built so in a loop with a layout of 2, 1, 1, 2."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist

    from megatron_zbpp.mcore.iteration.built import require_all_layers
    from megatron_zbpp.mcore.layout import StageLayout
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.settings import Settings

    placement = Programs(Settings('interleaved')).placement(2)
    models = []
    for stage in placement.stages(dist.get_rank()):
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in built[stage])
        model.config = SimpleNamespace(
            pipeline_model_parallel_layout=StageLayout(placement, 'Ett|t|t|ttL')
        )
        for layer, number in zip(model.layers, built[stage], strict=True):
            layer.layer_number = number
        models.append(model)
    try:
        require_all_layers(models, placement, dist.group.WORLD, nullcontext)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ('built', 'fits'),
    [
        ([[1, 2], [3], [4], [5, 6]], True),
        ([[1], [3], [], [6]], True),
        ([[1, 2, 1, 2], [3], [4], [5, 6]], True),
        ([[1, 2], [1], [1], [1, 2]], True),
        ([[1], [2], [3], [4]], False),
    ],
    ids=['as laid out', 'pruned', 'again', 'numbers of a rank', 'the layout ignored'],
)
def test_a_loop(ranks, built, fits):
    """What stock trains so trains; a class that ignores the layout is named."""
    for found in ranks(2).run(in_a_loop, built):
        assert found is None if fits else 'not built by pipeline_model_parallel_layout' in found
