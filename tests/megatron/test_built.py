"""Which layers a model has, and which a checkpoint: none is trained as another."""

import functools
import json
from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from example import groups
from models import Job, train
from outcome import error_of
from parsed_flags import PLACED
from rows import row, trains
from supported import refuses

import megatron_zbpp
from megatron_zbpp.mcore import layout
from megatron_zbpp.mcore.checkpoints import RankFiles, _stages
from megatron_zbpp.mcore.iteration.model_checks import require_all_layers
from megatron_zbpp.mcore.layout import StageLayout
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.schedules import build

pytestmark = pytest.mark.on_ranks(2)


def compared(built, schedule='zb-v', layout=None):
    """What is said where ranks have built these layers, a list for each stage."""
    placement = Programs(Settings(schedule)).placement(2)

    def with_layers(numbers):
        module = torch.nn.Module()
        module.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in numbers)
        for layer, number in zip(module.layers, numbers, strict=True):
            layer.layer_number = number
        return module

    def model(numbers):
        made = torch.nn.Module()
        made.decoder, made.mtp = with_layers(numbers), with_layers([1])
        if layout is not None:
            placed = StageLayout(placement, layout)
            made.decoder.config = SimpleNamespace(pipeline_model_parallel_layout=placed)
        return made.decoder if layout else made

    models = [model(built[stage]) for stage in placement.stages(dist.get_rank())]
    return error_of(require_all_layers, models, placement, dist.group.WORLD, nullcontext)


# numbers of layers by stage, and whether that is the schedule's model
BUILT_V = {
    'as planned': ([[1], [2], [3], [4]], True),
    'unevenly': ([[1, 2], [], [3], []], True),
    'nothing': ([[], [], [], []], True),
    'a loop': ([[1], [3], [2], [4]], False),
    'twice': ([[1], [2], [2], [3]], False),
    'missing': ([[1], [2], [4], [5]], False),
    'the first': ([[2], [3], [4], [5]], False),
}


@pytest.mark.parametrize(('built', 'fits'), BUILT_V.values(), ids=BUILT_V)
def test_a_v(built, fits):
    said = compared(built)
    assert (said is None) == fits
    if not fits:
        start = 'the layers of decoder.layers were not built where the schedule has'
        assert said.startswith(start) and f'by stage {built}' in said and 'such as zb-h1' in said


BUILT_LOOP = {
    'as laid out': ([[1, 2], [3], [4], [5, 6]], True),
    'pruned': ([[1], [3], [], [6]], True),
    'again': ([[1, 2, 1, 2], [3], [4], [5, 6]], True),
    'numbers of a rank': ([[1, 2], [1], [1], [1, 2]], True),
    'the layout ignored': ([[1], [2], [3], [4]], False),
}


@pytest.mark.parametrize(('built', 'fits'), BUILT_LOOP.values(), ids=BUILT_LOOP)
def test_a_loop(built, fits):
    """What stock trains so trains; a class that ignores the layout is named."""
    found = compared(built, 'interleaved', 'Ett|t|t|ttL')
    assert found is None if fits else 'not built by pipeline_model_parallel_layout' in found


def built_by(schedule, tells):
    """What a builder of NVIDIA's gives that is called for each chunk: numbers of layers; an error.
    Layers are heterogeneous, by a specification function that is not told which chunk it is for;
    `tells`: whether the model is."""
    import megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs as specs
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )

    whole = {'no_op': False, 'replace_with_linear': False, 'n_heads_in_group': 1}
    blocks = [{'attention': whole, 'ffn': whole | {'ffn_mult': 12.0 * n}} for n in (1, 2, 3, 4)]
    with megatron_zbpp.enable(schedule) as plugin, groups(pp=2, chunks=plugin.num_chunks):
        chunks = plugin.num_chunks
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

        def provider(vp_stage=None):
            spec = specs.get_gpt_heterogeneous_layer_spec(config)
            return GPTModel(config, spec, 64, 16, **({'vp_stage': vp_stage} if tells else {}))

        try:
            build = layout.of_one_chunk(functools.partial(provider))
            models = [build(vp_stage=chunk if chunks > 1 else None) for chunk in range(chunks)]
        except NotImplementedError as error:
            return str(error)
        if chunks > 1:
            with pytest.raises(ValueError, match='vp_stage is None, but each rank has 2'):
                specs.get_gpt_heterogeneous_layer_spec(config)
        layers = [layer for model in models for layer in model.decoder.layers]
        return [(layer.layer_number, layer.mlp.linear_fc2.weight.shape[1]) for layer in layers]


LAYERS = [(1, 256), (2, 512), (3, 768), (4, 1024)]


@pytest.mark.parametrize(
    ('schedule', 'held'),
    [('zb-v', [(1, 2), (0, 3)]), ('zb-interleaved', [(0, 2), (1, 3)]), ('zb-h1', [(0, 1), (2, 3)])],
)
def test_a_specification_of_an_untold_chunk(ranks, schedule, held):
    """Megatron's builders do not pass `vp_stage` to each of their specification functions."""
    found = ranks(2).run(built_by, schedule, True)
    assert found == [[LAYERS[stage] for stage in stages] for stages in held]


def test_a_model_that_is_not_told(ranks):
    """Its layers would be saved as those of another chunk."""
    assert isinstance(ranks(2).run(built_by, 'zb-h1', False)[0], list)
    for said in ranks(2).run(built_by, 'zb-v', False):
        assert 'provider does not pass vp_stage=0 to the GPTModel' in said
        assert 'such as zb-h1' in said


LAYOUT, EMBEDDING, LOSS, *_ = PLACED
CHUNKS = 'virtual_pipeline_model_parallel_size'
# Megatron's arguments, name by name, and the layers of each rank
SAVED = [
    ({}, [['E 1-4'], ['5-8 L']]),
    ({CHUNKS: 2}, [['E 1-2', '5-6'], ['3-4', '7-8 L']]),
    ({'decoder_first_pipeline_num_layers': 3}, [['E 1-3'], ['4-8 L']]),
    ({'num_layers': 6, EMBEDDING: True, LOSS: True}, [['E 1-3'], ['4-6 L']]),
    ({LAYOUT: 'Et*3|t*5,L'}, [['E 1-3'], ['4-8 L']]),
    ({LAYOUT: 'Et|ttt||ttttmL', CHUNKS: 2}, [['E 1', 'none'], ['2-4', '5-8 m1 L']]),
    ({'mtp_num_layers': 1}, [['E 1-4'], ['5-8 m1 L']]),
    ({'hybrid_layer_pattern': 'M*M|M-'}, [['E 1-3'], ['4-5 L']]),
    ({'hybrid_override_pattern': 'M*M-'}, [['E 1-2'], ['3-4 L']]),
]


@pytest.mark.parametrize(('settings', 'layers'), SAVED, ids=str)
def test_arguments_tell_the_layers(settings, layers):
    """Those that a stock run has saved."""
    args = Namespace(**{'num_layers': 8, 'pipeline_model_parallel_size': 2, **settings})
    assert [list(rank) for rank in RankFiles.saved({'args': args}).layers] == layers


def test_another_number_of_ranks_is_told():
    """`test_rank_files.py` has how other layers are; what is written is read again there."""
    args = Namespace(num_layers=4, pipeline_model_parallel_layout='Et|t|t|tL')
    placement = build('zb-v', 2, 4).placement
    files = RankFiles.of('zb-v', placement, _stages(args, placement))
    four = RankFiles.by_megatron(Namespace(num_layers=4, pipeline_model_parallel_size=4))
    assert files.difference(four) == "it has 2 pipeline ranks by zb-v, but 4 by Megatron's 1F1B"
    assert RankFiles.saved({}) is None


# ---- Models that do not have each layer once.


WHY = 'a stage cannot be told from one that was built elsewhere'
test_identical_to_megatron = trains(
    'layers {change}',
    {'layers': 4},  # over ranks: two in each chunk of a V
    row(
        '',
        ('zb-h1', 'zb-2p+post-validation', 'interleaved', 'zb-v'),
        lambda change, schedule, **_: change == 'run twice' or schedule != 'zb-v',
        **{'change': ('run twice', 'pruned', 'numbered from 11', 'run twice'), 'te': (False, True)},
        kernels={'fused': {'fused': True, 'bf16': True}, 'plain': {}},
    ),
    te=True,
)


@refuses('layers {change}', WHY, 'zb-v')
@pytest.mark.parametrize('change', ['pruned', 'numbered from 11'])
def test_refused_in_a_v(ranks, data, change):
    job = Job(layers=4, change=change, te=False)
    for found in ranks(2).run(error_of, train, job, job.argv('zb-v', False, data)):
        assert found.startswith('the layers of decoder.layers were not built where the schedule')
        assert 'such as zb-h1, for layers that are pruned or have other numbers' in found
