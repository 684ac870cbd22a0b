"""Settings that are refused with others, with a technique, or by some releases only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from refused_settings import refused
from supported import absent, refuses

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.model_settings import HYBRID

pytestmark = pytest.mark.each_release

SHARDED = ['use_mup', 'defer_embedding_wgrad_compute', 'init_model_with_meta_device']
SHARDED += ['variable_seq_lengths', 'logits_load_dir', 'mtp_num_layers', 'export_kd_teacher_load']
GIVEN = {
    'cross_entropy_fusion_impl': ({'cross_entropy_loss_fusion': True}, 'te', 'native'),
    'untie_embeddings_and_output_weights': ({}, False, True),
    **{setting: ({}, 1, None) for setting in SHARDED},
}


def shards(setting):
    """The case, and what the page of support says of it."""
    (found,) = refused_with_shards(setting)
    marks = refuses(f'`--pipeline-vocab-parallel`, `{setting}`', found.reason)
    return pytest.param(setting, marks=marks, id=setting)


def refused_with_shards(setting, cured=False, techniques=('split_vocabulary',)):
    others, *values = GIVEN[setting]
    given = SimpleNamespace(**others, **{setting: values[cured]})
    return [*refused(given, placement=Placement.loop(2), techniques=techniques)]


@pytest.mark.parametrize('setting', [*map(shards, GIVEN)])
def test_refused_with_shards(setting):
    """Of the output layer; without them, and with the cure, it is not."""
    (found,) = refused_with_shards(setting)
    assert found.setting == setting
    assert found.cure.endswith('or leave out --pipeline-vocab-parallel')
    assert refused_with_shards(setting, techniques=()) == refused_with_shards(setting, True) == []


_TWICE = 'a forward that runs again would enter its largest values a second time'
_CAPTURED = 'a captured forward cannot run again with other random states'


@refuses('`--pipeline-recompute`, scales of FP8 by history', _TWICE)
@refuses('`--pipeline-recompute`, `cuda_graph_impl`', _CAPTURED)
def test_what_cannot_run_again():
    """In recompute passes only."""
    asked = SimpleNamespace(fp8='hybrid', fp8_recipe='delayed', cuda_graph_impl='local')
    found = [str(each) for each in refused(asked, splits=False, techniques={'recompute'})]
    assert [text.partition(':')[0] for text in found] == [
        'fp8_recipe=delayed',
        'cuda_graph_impl=local',
    ]
    assert f'{_TWICE}; give --fp8-recipe tensorwise' in found[0] and _CAPTURED in found[1]
    assert not list(refused(asked, splits=False))
    asked.fp8_recipe, asked.cuda_graph_impl = 'tensorwise', 'none'
    assert not list(refused(asked, techniques={'recompute'}))


@refuses(
    'multi-token prediction, tied embeddings',
    'Megatron cannot save the last of several pipeline ranks',
)
def test_tied_embeddings_and_multi_token_prediction():
    tied = SimpleNamespace(mtp_num_layers=1, untie_embeddings_and_output_weights=False)
    (found,) = refused(tied)
    assert str(found).startswith('mtp_num_layers=1: with tied embeddings Megatron cannot save')
    tied.untie_embeddings_and_output_weights = True
    assert not list(refused(tied))


@refuses('`MambaModel`', 'this release of Megatron lays its layers out in a loop', 'zb-v')
def test_layers_that_megatron_lays_out_in_a_loop(ranks):
    knows_one_chunk, found = ranks(2).run(hybrid_refused)[0]
    assert found == (HYBRID if knows_one_chunk else ())
    if not knows_one_chunk:
        pytest.skip('from 0.17 on a hybrid model may have segments')


def hybrid_refused():
    """By which settings this release refuses a hybrid model in a V, and in loops by none."""
    from megatron_zbpp.mcore import compat

    found = [
        refusal.setting
        for name in HYBRID
        for placement in (Placement.v(2), Placement.loop(2), Placement.loop(2, 3), Placement.v(1))
        for refusal in refused(SimpleNamespace(**{name: 'M*|M-'}), placement=placement)
    ]
    return compat.segments_module() is None, tuple(found)


def packed_refused():
    """What this release says of packed sequences on 2 stages, and on 4."""
    from megatron_zbpp.mcore import compat

    asked = SimpleNamespace(sft=True, pipeline_model_parallel_size=2)
    found = [
        list(map(str, refused(asked, placement=placement)))
        for placement in (None, Placement.loop(2), Placement.v(2), Placement.loop(4))
    ]
    return compat.tells_all_stages_of_sequences(), found


@refuses(
    '`sft`, more than two stages',
    'this release of Megatron tells the first and the last stage alone where packed sequences end',
    'zb-v',
)
def test_packed_sequences_of_middle_stages(ranks):
    told, (alone, loop, v, four) = ranks(2).run(packed_refused)[0]
    assert not alone and not loop
    if told:
        assert not v and not four
        absent('from 0.19 on all stages are told')
    assert v == four and v[0].startswith('sft=True: this release of Megatron tells the first')


@refuses(
    '`reset_attention_mask`, more than two ranks',
    'Megatron gives such masks to the first and the last stage alone',
    'zb-v interleaved',
)
def test_masks_of_middle_stages():
    asked = SimpleNamespace(reset_attention_mask=True)
    for placement in (Placement.v(4), Placement.loop(4, 2)):
        (found,) = refused(asked, placement=placement)
        assert str(found).startswith('reset_attention_mask=True: Megatron gives such masks to the')
        assert 'such as zb-h1' in found.cure
    for placement in (Placement.v(2), Placement.loop(4)):
        assert not list(refused(asked, placement=placement))
    asked.create_attention_mask_in_dataloader = False
    assert not list(refused(asked, placement=Placement.v(4)))


_IN_PARTS = 'layers run in parts, which have no seeds'
_NO_SEEDS = 'captured layers cannot be seeded'


@refuses('`--pipeline-dropout-seeds`, `overlap_moe_expert_parallel_comm`', _IN_PARTS)
@refuses('`--pipeline-dropout-seeds`, `cuda_graph_impl`', _NO_SEEDS)
def test_what_cannot_be_seeded():
    asked = SimpleNamespace(overlap_moe_expert_parallel_comm=True, cuda_graph_impl='local')
    how = {'splits': False, 'joins': True}
    found = [*refused(asked, seeded=True, **how)]
    assert [each.reason for each in found] == [_IN_PARTS, _NO_SEEDS]
    assert all(each.cure.endswith('or leave out --pipeline-dropout-seeds') for each in found)
    assert not list(refused(asked, **how))


def hybrid_masks_refused():
    """What this release says of masks for a hybrid model of several chunks; since when it can."""
    from megatron_zbpp.mcore import compat

    asked = SimpleNamespace(reset_attention_mask=True, hybrid_layer_pattern='M*|M*|M*|M*')
    found = refused(asked, placement=Placement.v(2))
    return compat.get_batch_module(), [each.setting for each in found]


def test_masks_of_hybrid_models(ranks):
    where, found = ranks(2).run(hybrid_masks_refused)[0]
    assert ('reset_attention_mask' in found) == (where != 'megatron.core.utils')
