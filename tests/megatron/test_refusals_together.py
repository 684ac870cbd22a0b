"""Settings that are refused with others, with a technique, or by some releases only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from refused_settings import HYBRID, OF_SHARDS, OF_SLICES, VALUES, cured
from supported import absent, refuses

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import refusals

pytestmark = pytest.mark.each_release


@pytest.mark.parametrize(
    'setting', [*OF_SLICES, 'mtp_num_layers', 'sft', refusals.OVERLAP, 'export_kd_teacher_load']
)
def test_refused_with_slices(setting):
    how = {'placement': Placement.loop(2), 'joins': True}
    given = SimpleNamespace(**{setting: 1})
    assert not [*refusals.refused(given, **how)]
    (found,) = refusals.refused(given, techniques={'sliced'}, **how)
    assert found.setting == setting and found.cure.endswith('a schedule of whole sequences')


@pytest.mark.parametrize(
    ('setting', 'values', 'cured'),
    [
        (
            'moe_router_load_balancing_type',
            ['sinkhorn', 'quantile_balancing', 'a new one', ['aux_loss', 'global_aux_loss']],
            ['none', 'aux_loss', ['seq_aux_loss', 'aux_loss']],
        ),
        ('position_embedding_type', ['mrope'], ['rope', 'yarn']),
    ],
)
def test_values_refused_with_slices(setting, values, cured):
    """Balancing by other tokens is refused, whatever its name is."""
    how = {'placement': Placement.loop(2), 'techniques': {'sliced'}}
    for value in values:
        (found,) = refusals.refused(SimpleNamespace(**{setting: value}), **how)
        assert found.setting == setting and found.cure.endswith('a schedule of whole sequences')
    for value in cured:
        assert not [*refusals.refused(SimpleNamespace(**{setting: value}), **how)]


SHARDED = [*OF_SHARDS, 'variable_seq_lengths', 'logits_load_dir', 'mtp_num_layers']
SHARDED += ['export_kd_teacher_load']
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
    return [*refusals.refused(given, placement=Placement.loop(2), techniques=techniques)]


@pytest.mark.parametrize('setting', [*map(shards, GIVEN)])
def test_refused_with_shards(setting):
    """Of the output layer; without them, and with the cure, it is not."""
    (found,) = refused_with_shards(setting)
    assert found.setting == setting
    assert found.cure.endswith('or leave out --pipeline-vocab-parallel')
    assert refused_with_shards(setting, techniques=()) == refused_with_shards(setting, True) == []


BALANCING = 'moe_router_load_balancing_type'
OF_VERSIONS = [
    ({name: 1}, name)
    for name in (
        'overlap_param_gather',
        'fp8',
        'fp4',
        'mtp_num_layers',
        'optimizer_cpu_offload',
        'fine_grained_activation_offloading',
        'save_params_interval',
        'experimental_attention_variant',
        'moe_enable_routing_replay',
        'save_activations_interval',
        'save_tokens_per_expert_interval',
        'save_dgrads_interval',
        'log_max_attention_logit',
        'qk_clip',
        'moe_routing_trace_path',
        'moe_router_enable_expert_bias',
    )
]
OF_VERSIONS += [({BALANCING: kind}, BALANCING) for kind in ('quantile_balancing', 'of tomorrow')]
OF_VERSIONS += [({BALANCING: ['aux_loss', 'global_aux_loss']}, BALANCING)]


@pytest.mark.parametrize(('given', 'name'), OF_VERSIONS, ids=str)
def test_refused_with_versions(given, name):
    """By asynchronous schedules alone, and no more once it is cured."""
    settings, how = SimpleNamespace(**given), {'joins': True, 'in_order': True, 'splits': False}
    (found,) = refusals.refused(settings, techniques={'updating'}, **how)
    assert (found.setting, found.value) == (name, given[name])
    assert found.cure.endswith('or take a synchronous schedule, such as zb-v')
    assert not [*refusals.refused(settings, **how)]
    assert not [*refusals.refused(cured(settings, found), techniques={'updating'}, **how)]


def test_routers_that_keep_no_counts():
    for kind in (None, 'aux_loss', ['seq_aux_loss', 'aux_loss'], 'sinkhorn', 'none'):
        settings = SimpleNamespace(**{BALANCING: kind})
        assert not [*refusals.refused(settings, techniques={'updating'})]


_TWICE = 'a forward that runs again would enter its largest values a second time'
_CAPTURED = 'a captured forward cannot run again with other random states'


@refuses('`--pipeline-recompute`, scales of FP8 by history', _TWICE)
@refuses('`--pipeline-recompute`, `cuda_graph_impl`', _CAPTURED)
def test_what_cannot_run_again():
    """In recompute passes only."""
    asked = SimpleNamespace(fp8='hybrid', fp8_recipe='delayed', cuda_graph_impl='local')
    found = [str(each) for each in refusals.refused(asked, splits=False, techniques={'recompute'})]
    assert [text.partition(':')[0] for text in found] == [
        'fp8_recipe=delayed',
        'cuda_graph_impl=local',
    ]
    assert f'{_TWICE}; give --fp8-recipe tensorwise' in found[0] and _CAPTURED in found[1]
    assert not list(refusals.refused(asked, splits=False))
    asked.fp8_recipe, asked.cuda_graph_impl = 'tensorwise', 'none'
    assert not list(refusals.refused(asked, techniques={'recompute'}))


@refuses(
    'multi-token prediction, tied embeddings',
    'Megatron cannot save the last of several pipeline ranks',
)
def test_tied_embeddings_and_multi_token_prediction():
    tied = SimpleNamespace(mtp_num_layers=1, untie_embeddings_and_output_weights=False)
    (found,) = refusals.refused(tied)
    assert str(found).startswith('mtp_num_layers=1: with tied embeddings Megatron cannot save')
    tied.untie_embeddings_and_output_weights = True
    assert not list(refusals.refused(tied))


@pytest.mark.parametrize('placement', [Placement.loop(2), Placement.loop(2, 3), Placement.v(1)])
def test_hybrid_models_in_loops(placement):
    args = SimpleNamespace(hybrid_layer_pattern='M*|M-')
    assert not list(refusals.refused(args, placement=placement))


def hybrid_refused():
    """By which settings this release refuses a hybrid model in a V, or False."""
    from megatron_zbpp.mcore import compat

    found = [
        refusal.setting
        for name in HYBRID
        for value in VALUES[name]
        for refusal in refusals.refused(SimpleNamespace(**{name: value}), placement=Placement.v(2))
    ]
    return compat.segments_module() is None, found


def test_hybrid_models_by_release(ranks):
    for knows_one_chunk, found in ranks(2).run(hybrid_refused):
        assert found == (HYBRID if knows_one_chunk else [])


@refuses('`MambaModel`', 'this release of Megatron lays its layers out in a loop', 'zb-v')
def test_layers_that_megatron_lays_out_in_a_loop(ranks):
    knows_one_chunk, found = ranks(2).run(hybrid_refused)[0]
    if not knows_one_chunk:
        pytest.skip('from 0.17 on a hybrid model may have segments')
    assert found == HYBRID


def packed_refused():
    """What this release says of packed sequences on 2 stages, and on 4."""
    from megatron_zbpp.mcore import compat

    asked = SimpleNamespace(sft=True, pipeline_model_parallel_size=2)
    found = [
        list(map(str, refusals.refused(asked, placement=placement)))
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
        (found,) = refusals.refused(asked, placement=placement)
        assert str(found).startswith('reset_attention_mask=True: Megatron gives such masks to the')
        assert 'such as zb-h1' in found.cure
    for placement in (Placement.v(2), Placement.loop(4)):
        assert not list(refusals.refused(asked, placement=placement))
    asked.create_attention_mask_in_dataloader = False
    assert not list(refusals.refused(asked, placement=Placement.v(4)))


_IN_PARTS = 'layers run in parts, which have no seeds'
_NO_SEEDS = 'captured layers cannot be seeded'


@refuses('`--pipeline-dropout-seeds`, `overlap_moe_expert_parallel_comm`', _IN_PARTS)
@refuses('`--pipeline-dropout-seeds`, `cuda_graph_impl`', _NO_SEEDS)
def test_what_cannot_be_seeded():
    asked = SimpleNamespace(overlap_moe_expert_parallel_comm=True, cuda_graph_impl='local')
    how = {'splits': False, 'joins': True}
    found = [*refusals.refused(asked, seeded=True, **how)]
    assert [each.reason for each in found] == [_IN_PARTS, _NO_SEEDS]
    assert all(each.cure.endswith('or leave out --pipeline-dropout-seeds') for each in found)
    assert not list(refusals.refused(asked, **how))


# what is refused with others, or by some releases, only: settings, and how it is asked
TOGETHER = {
    'delayed scaling and recompute passes': (
        {'fp8': 'hybrid', 'fp8_recipe': 'delayed'},
        {'techniques': {'recompute'}},
    ),
    'graphs and recompute passes': ({'cuda_graph_impl': 'local'}, {'techniques': {'recompute'}}),
    'multi-token prediction': (
        {'mtp_num_layers': 1, 'untie_embeddings_and_output_weights': False},
        {},
    ),
    'packed sequences': ({'sft': True}, {'placement': Placement.v(4)}),
    'masks': ({'reset_attention_mask': True}, {'placement': Placement.v(4)}),
    **{name: ({name: VALUES[name][0]}, {'placement': Placement.v(2)}) for name in HYBRID},
}


def refused_and_cured(settings, how):
    """What is said; what is said once each cure that it names has been done, by itself."""
    asked = SimpleNamespace(**settings)
    said = list(refusals.refused(asked, **how))
    flags, placed = asked, dict(how)
    again = []
    for found in said:
        flags = cured(flags, found)
        if 'such as zb-h1' in found.cure:
            placed['placement'] = Placement.loop(how['placement'].num_ranks)
        elif 'have two stages' in found.cure:
            placed['placement'] = Placement.loop(2)
    if flags != asked:
        again.append(list(map(str, refusals.refused(flags, **how))))
    if placed != how:
        again.append(list(map(str, refusals.refused(asked, **placed))))
    return list(map(str, said)), again


@pytest.mark.parametrize('case', TOGETHER)
def test_cures_of_what_is_refused_with_others(ranks, case):
    """Of what some releases refuse, other tests hold which."""
    said, again = ranks(2).run(refused_and_cured, *TOGETHER[case])[0]
    assert bool(again) == bool(said) and not any(again), said
    assert said or case in ('packed sequences', *HYBRID)
    assert len(again) == 2 if case == 'masks' else len(again) <= 1


def hybrid_masks_refused():
    """What this release says of masks for a hybrid model of several chunks; since when it can."""
    from megatron_zbpp.mcore import compat

    asked = SimpleNamespace(reset_attention_mask=True, hybrid_layer_pattern='M*|M*|M*|M*')
    found = refusals.refused(asked, placement=Placement.v(2))
    return compat.get_batch_module(), [each.setting for each in found]


def test_masks_of_hybrid_models(ranks):
    where, found = ranks(2).run(hybrid_masks_refused)[0]
    assert ('reset_attention_mask' in found) == (where != 'megatron.core.utils')
