"""A model whose layers are elsewhere than the schedule's stages never begins to train."""

from __future__ import annotations

import functools
import json

import pytest
import torch


def compared(built, schedule='zb-v'):
    """What is said where ranks have built these layers, a list for each stage."""
    from contextlib import nullcontext

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


def built_by(provider, schedule):
    """What a builder of NVIDIA's gives that is called for each chunk: numbers of layers; an error.

    Layers are heterogeneous, by a specification function that is not told which chunk it is for.
    """
    import megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs as specs
    from example import forget_groups
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )

    import megatron_zbpp
    from megatron_zbpp.mcore import building

    whole = {'no_op': False, 'replace_with_linear': False, 'n_heads_in_group': 1}
    blocks = [{'attention': whole, 'ffn': whole | {'ffn_mult': 12.0 * n}} for n in (1, 2, 3, 4)]
    with megatron_zbpp.enable(schedule) as plugin:
        chunks = plugin.num_chunks
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = HeterogeneousTransformerConfig(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            pipeline_model_parallel_layout='Et|t|t|tL' if chunks > 1 else None,
            pipeline_dtype=torch.float32,
            heterogeneous_layers_config_encoded_json=json.dumps({'block_configs': blocks}),
        )

        def tells_the_model(vp_stage=None):
            spec = specs.get_gpt_heterogeneous_layer_spec(config)
            return GPTModel(config, spec, 64, 16, vp_stage=vp_stage)

        def tells_nobody(vp_stage=None):
            spec = specs.get_gpt_heterogeneous_layer_spec(config)
            return GPTModel(config, spec, 64, 16)

        try:
            build = building.of_one_chunk(functools.partial(locals()[provider]))
            models = [build(vp_stage=chunk if chunks > 1 else None) for chunk in range(chunks)]
            found = [
                (layer.layer_number, layer.mlp.linear_fc2.weight.shape[1])
                for model in models
                for layer in model.decoder.layers
            ]
            if chunks > 1:
                with pytest.raises(ValueError, match='vp_stage is None, but each rank has 2'):
                    specs.get_gpt_heterogeneous_layer_spec(config)
            return found
        except NotImplementedError as error:
            return str(error)
        finally:
            forget_groups()


LAYERS = [(1, 256), (2, 512), (3, 768), (4, 1024)]


@pytest.mark.parametrize(
    ('schedule', 'held'),
    [('zb-v', [(1, 2), (0, 3)]), ('zb-interleaved', [(0, 2), (1, 3)]), ('zb-h1', [(0, 1), (2, 3)])],
)
def test_a_specification_of_an_untold_chunk(ranks, schedule, held):
    """Megatron's builders do not pass `vp_stage` to each of their specification functions."""
    found = ranks(2).run(built_by, 'tells_the_model', schedule)
    assert found == [[LAYERS[stage] for stage in stages] for stages in held]


def test_a_model_that_is_not_told(ranks):
    """Its layers would be saved as those of another chunk."""
    assert isinstance(ranks(2).run(built_by, 'tells_nobody', 'zb-h1')[0], list)
    for said in ranks(2).run(built_by, 'tells_nobody', 'zb-v'):
        assert 'tells_nobody does not pass vp_stage=0 to the GPTModel' in said
        assert 'such as zb-h1' in said
