"""What is refused exists, is refused by name before anything starts, and has a cure that exists."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import pytest
from paths import ROOT
from refused_settings import CASES, WITHOUT_TE, cured
from supported import refuses

from megatron_zbpp.emulation import te
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import refusals

pytestmark = pytest.mark.each_release

HARMLESS = {
    'cuda_graph_impl': ['none', None],
    'transformer_impl': ['local'],
    'attention_backend': ['auto', 'unfused', SimpleNamespace(name='local')],
    'context_parallel_size': [1],
    'tensor_parallel_num_weight_shards': [None, 1],
    'expert_tensor_parallel_num_weight_shards': [None, 1],
}


def shown(setting, value):
    """The case, and what the page of support says of it; nothing of what a GPU can."""
    found = refusals.refused(SimpleNamespace(**{setting: value}), placement=Placement.v(2))
    marks = [refuses(f'`{each.setting}`', each.reason) for each in found]
    return pytest.param(setting, value, marks=marks, id=f'{setting}-{value}')


@pytest.mark.parametrize(('setting', 'value'), [shown(*case) for case in CASES])
def test_each_is_named(setting, value):
    found = list(
        refusals.refused(SimpleNamespace(**{setting: value}), True, placement=Placement.v(2))
    )
    assert [each.setting for each in found] == [setting]
    assert str(found[0]).startswith(f'{setting}={getattr(value, "name", value)}: ')
    assert found[0].reason and found[0].cure in str(found[0])


def test_one_place_asks():
    """Flags, doctor, Bridge and the first call give it their settings alone."""
    askers = {'refusals.refused(': set(), 'preflight.refused(': set()}
    for file in (ROOT / 'megatron_zbpp').rglob('*.py'):
        for asked, found in askers.items():
            if asked in file.read_text():
                found.add(file.stem)
    assert askers['refusals.refused('] == {'preflight'}
    assert askers['preflight.refused('] == {'plan_layout', 'dry_run', 'bridge', 'preparation'}


@pytest.mark.parametrize(('setting', 'value'), CASES, ids=str)
def test_cures_cure(setting, value):
    """What a refusal says to do, done, is no more refused."""
    for on_cpu in (False, True):
        settings = SimpleNamespace(**{setting: value})
        for found in refusals.refused(settings, on_cpu, placement=Placement.v(2)):
            again = cured(settings, found)
            assert again != settings, found.cure
            assert not list(refusals.refused(again, on_cpu, placement=Placement.v(2)))


@pytest.mark.parametrize('setting', refusals.settings())
def test_what_is_not_set_is_not_refused(setting):
    for value in HARMLESS.get(setting, [None, False, 0]):
        found = refusals.refused(
            SimpleNamespace(**{setting: value}), True, placement=Placement.v(2)
        )
        assert not list(found)


def test_a_gpu_can_more():
    everything = SimpleNamespace(**dict(CASES))
    vee = Placement.v(2)
    here = {each.setting for each in refusals.refused(everything, placement=vee)}
    there = {each.setting for each in refusals.refused(everything, on_cpu=True, placement=vee)}
    assert there == set(WITHOUT_TE) and here < there
    needs_gpu = {'fp8', 'use_flash_attn', 'moe_grouped_gemm', 'context_parallel_size'}
    assert needs_gpu | {'transformer_impl', 'attention_backend'} <= there - here


def test_emulated_transformer_engine_can_more(monkeypatch, tmp_path):
    layers = SimpleNamespace(transformer_impl='transformer_engine', moe_grouped_gemm=True)
    assert len(list(refusals.refused(layers, on_cpu=True))) == 2
    assert not list(refusals.refused(layers, on_cpu=True, with_te=True))
    monkeypatch.setattr(te, '_CHECKOUT', tmp_path)  # a wheel has no kernels to emulate them with
    found = [each.reason for each in refusals.refused(layers, on_cpu=True)]
    assert len(found) == 2 and all('run from a checkout' in text for text in found)
    for recipe in ('tensorwise', 'blockwise', 'mxfp8'):
        fp8 = SimpleNamespace(fp8='hybrid', fp8_recipe=recipe)
        assert [r.setting for r in refusals.refused(fp8, on_cpu=True)] == ['fp8']
        found = [str(each) for each in refusals.refused(fp8, on_cpu=True, with_te=True)]
        cure = f'fp8_recipe={recipe}: its kernels need a GPU; give --fp8-recipe tensorwise'
        assert found == ([] if recipe == 'tensorwise' else [cure])
    flash = SimpleNamespace(attention_backend='flash', transformer_impl='inference_optimized')
    refused = [each.setting for each in refusals.refused(flash, on_cpu=True, with_te=True)]
    assert refused == ['transformer_impl', 'attention_backend']


def test_attention_of_a_spec_may_split_the_sequence():
    own = SimpleNamespace(context_parallel_size=2, spec=['specs', 'context'])
    assert not list(refusals.refused(own, on_cpu=True))


@pytest.mark.parametrize(
    ('shards', 'sizes', 'which'),
    [
        ((4, None), (2, None), ['tensor']),
        ((2, 4), (2, None), ['expert_tensor']),
        ((2, 2), (2, 1), ['expert_tensor']),
        ((2, 2), (2, None), []),  # as config has it where nobody asks for more
        ((2, 2), (2, 2), []),
    ],
)
def test_weights_sharded_further(shards, sizes, which):
    """Than tensor parallelism does: the config of a program has numbers, also where none is asked
    for."""
    dense, experts = (f'{kind}_parallel_num_weight_shards' for kind in ('tensor', 'expert_tensor'))
    sized = {'tensor_model_parallel_size': sizes[0], 'expert_tensor_parallel_size': sizes[1]}
    args = SimpleNamespace(**{dense: shards[0], experts: shards[1]}, **sized)
    found = [each.setting for each in refusals.refused(args)]
    assert found == [f'{kind}_parallel_num_weight_shards' for kind in which]
    assert not list(refusals.refused(args, splits=False))


@refuses(f'`{refusals.GROUPED_VARIABLE}=1`', "W passes cannot keep Transformer Engine's Grouped")
def test_grouped_tensors_by_the_environment():
    """Of experts, until 0.19: Megatron's main branch tells Transformer Engine itself."""
    experts = SimpleNamespace(moe_grouped_gemm=True)
    for value, wanted in (('1', True), ('0', False), ('', False)):
        with mock.patch.dict(os.environ, {refusals.GROUPED_VARIABLE: value}):
            found = [str(each) for each in refusals.refused(experts)]
            assert [refusals.GROUPED_VARIABLE in each for each in found] == [True] * wanted
            assert not list(refusals.refused(experts, splits=False))
            assert not list(refusals.refused(SimpleNamespace(moe_grouped_gemm=False)))
            told = SimpleNamespace(moe_grouped_gemm=True, moe_use_grouped_tensor=False)
            assert not list(refusals.refused(told))


def test_without_w_passes_more_may_be():
    experts = {'overlap_dispatch_backward_with_experts_wgrad': True}
    args = SimpleNamespace(tp_comm_overlap=True, cuda_graph_impl='local', **experts)
    found = [str(each) for each in refusals.refused(args)]
    assert len(found) == 3 and all('1f1b' in each for each in found)
    assert not list(refusals.refused(args, splits=False))
    args = SimpleNamespace(cuda_graph_impl='local', cuda_graph_scope=['full_iteration'])
    assert list(refusals.refused(args, splits=False))
