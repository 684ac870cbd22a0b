"""What is refused exists, is refused by name before anything starts, and has a cure that exists."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from nvidia import CHECKOUT, COMMON, SCRIPT, forget, known, needs_training
from outcome import of_all, outcome, refusal

from megatron_zbpp.mcore import refusals

# settings and flags of some releases only: of which
OF_SOME = {
    'use_legacy_models': 'until 0.17',
    '--use-legacy-models': 'until 0.17',
    'overlap_dispatch_backward_with_experts_wgrad': 'from 0.18',
    '--overlap-dispatch-backward-with-experts-wgrad': 'from 0.18',
}
# values that are refused, where it is not any
VALUES = {
    'cuda_graph_impl': ['local', 'transformer_engine', 'full_iteration'],
    'transformer_impl': ['transformer_engine', 'inference_optimized'],
    'attention_backend': ['flash', 'fused', SimpleNamespace(name='flash')],
    'context_parallel_size': [2],
    'fp8_recipe': ['mxfp8'],
}
HARMLESS = {
    'cuda_graph_impl': ['none', None],
    'transformer_impl': ['local'],
    'attention_backend': ['auto', 'unfused', SimpleNamespace(name='local')],
    'context_parallel_size': [1],
}
WITHOUT_TE = [s for s in refusals.settings() if s != 'fp8_recipe']  # which it knows
CASES = [(setting, value) for setting in WITHOUT_TE for value in VALUES.get(setting, [1])]


@pytest.mark.parametrize(('setting', 'value'), CASES, ids=str)
def test_each_is_named(setting, value):
    found = list(refusals.refused(SimpleNamespace(**{setting: value}), on_cpu=True))
    assert [each.setting for each in found] == [setting]
    assert str(found[0]).startswith(f'{setting}={getattr(value, "name", value)}: ')
    assert found[0].reason and found[0].cure in str(found[0])


@pytest.mark.parametrize('setting', refusals.settings())
def test_what_is_not_set_is_not_refused(setting):
    for value in HARMLESS.get(setting, [None, False, 0]):
        assert not list(refusals.refused(SimpleNamespace(**{setting: value}), on_cpu=True))


def test_a_gpu_can_more():
    everything = SimpleNamespace(**dict(CASES))
    here = {each.setting for each in refusals.refused(everything)}
    there = {each.setting for each in refusals.refused(everything, on_cpu=True)}
    assert there == set(WITHOUT_TE) and here < there
    needs_gpu = {'fp8', 'use_flash_attn', 'moe_grouped_gemm', 'context_parallel_size'}
    assert needs_gpu | {'transformer_impl', 'attention_backend'} <= there - here


def test_emulated_transformer_engine_can_more():
    layers = SimpleNamespace(transformer_impl='transformer_engine', moe_grouped_gemm=True)
    assert len(list(refusals.refused(layers, on_cpu=True))) == 2
    assert not list(refusals.refused(layers, on_cpu=True, with_te=True))
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


@needs_training
def test_each_exists(ranks):
    """In this release; or it is known to be of others."""
    found, _ = ranks(2).run(known)
    cures = ' '.join(
        str(each) for each in refusals.refused(SimpleNamespace(**dict(CASES)), on_cpu=True)
    )
    wanted = {*refusals.settings(), *re.findall(r'--[a-z0-9-]+', cures)}
    assert '--no-rope-fusion' in wanted
    assert wanted - found <= set(OF_SOME)


def launch(*argv):
    """On each rank: the script under our launcher, until it has parsed its arguments."""
    if CHECKOUT and CHECKOUT not in sys.path:
        sys.path.insert(0, CHECKOUT)
    import megatron.training  # noqa: F401  # it prints

    import megatron_zbpp.launch

    with mock.patch.object(sys, 'argv', sys.argv):
        try:
            return outcome(megatron_zbpp.launch.main, ['--cpu', str(SCRIPT), *argv])
        finally:
            forget()


@needs_training
@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ('--transformer-impl inference_optimized', 'give --transformer-impl local'),
        ('--fp8-format e4m3', 'drop --fp8-format'),
        ('--use-flash-attn', 'drop --use-flash-attn'),
        ('--attention-backend flash', 'attention_backend=flash: its kernels need a GPU'),
        ('--num-experts 2 --moe-grouped-gemm', 'drop --moe-grouped-gemm'),
        ('--context-parallel-size 2', 'context_parallel_size=2'),
        ('--mtp-num-layers 1', 'drop --mtp-num-layers'),
        ('--tp-comm-overlap', 'drop --tp-comm-overlap'),
        ('--cuda-graph-impl local', 'give --cuda-graph-impl none'),
        ('--use-megatron-fsdp', 'use --use-distributed-optimizer'),
        ('--use-torch-fsdp2', 'use --use-distributed-optimizer'),
        ('--overlap-moe-expert-parallel-comm', 'drop --overlap-moe-expert-parallel-comm'),
        ('--pipeline-schedule zb-w', "unknown schedule 'zb-w'"),
        ('--yaml-cfg nowhere.yaml', '--yaml-cfg'),
        ('--use-checkpoint-args', 'give the arguments of the checkpoint as flags'),
    ],
)
def test_refused_by_the_script(ranks, flags, said):
    own = '--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule zb-v'
    found = of_all(ranks(2).run(launch, *COMMON, *own.split(), *flags.split()))
    assert said in refusal(found, SCRIPT.name)
