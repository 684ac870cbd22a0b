"""Each rule holds by name before anything starts, and its cures cure: a row is its own test."""

import re
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace

import pytest
from paths import ROOT
from refused_settings import (
    BASE,
    ELSE,
    OF_RELEASES,
    SHOWN,
    WHERE,
    case_of,
    conditions_of,
    cured,
    harmless,
    in_this_release,
    refused,
)
from supported import refuses

from megatron_zbpp.emulation import te
from megatron_zbpp.mcore.job.rules import CONDITIONS, REFUSED, RULES, settings
from megatron_zbpp.mcore.settings import BY_FLAG

pytestmark = pytest.mark.each_release


ROWS = [(rule, name) for rule in RULES for name in rule.settings]
IDS = [f'{rule.effect}-{rule.when.text}-{name}' for rule, name in ROWS]


def shown(rule, name, lines=SHOWN):
    """The row, and what the page of support says of it; nothing of what a GPU can."""
    claimed = rule.effect == REFUSED and rule.when.text in lines and isinstance(rule.reason, str)
    feature, schedules = lines.get(rule.when.text, ('', ''))
    reason = BY_FLAG.fill(rule.reason) if claimed else ''
    marks = [refuses(feature.format(name=name), reason, schedules)] if claimed else []
    return pytest.param(rule, name, marks=marks)


@pytest.mark.parametrize(('rule', 'name'), [shown(*row) for row in ROWS], ids=IDS)
def test_each_is_named(rule, name):
    """With its value, reason and cure; each cure that it names, done by itself, ends that."""
    case = case_of(rule, name)
    found = case.said(rule)
    assert bool(found) == in_this_release(rule)
    for each in found:
        reason = each.reason if callable(rule.reason) else BY_FLAG.fill(rule.reason)
        assert str(each).startswith(f'{name}={case.values[name]}: {reason}')
        assert reason and each.cure == BY_FLAG.fill(rule.cure) and each.cure in str(each)
    done = cured(case, rule)
    assert bool(done) == bool(rule.cure)
    for each in done:
        assert each != case and not each.said(rule), each


@pytest.mark.parametrize(('rule', 'name'), ROWS, ids=IDS)
def test_each_condition_is_needed(rule, name):
    """And the value: what is not set, or has another, has no effect."""
    for each in conditions_of(rule):
        if each in ELSE:
            assert not case_of(rule, name).with_(ELSE[each]).said(rule), each
        elif each in WHERE or each.startswith('`'):
            assert not case_of(rule, name, but=each).said(rule), each
    for value in harmless(rule):
        assert not case_of(rule, name).with_({'own': value}).said(rule), value


def test_all_conditions_are_of_rows():
    """And the tests above leave out each, but for those that who asks knows to be true."""
    used = {each for rule in RULES for each in conditions_of(rule)}
    assert {*CONDITIONS} - used == {'every schedule'}
    left = {each for each in used - {*WHERE, *ELSE} if not re.search(r'`|\d', each)}
    assert left == {'post-validation', 'post-validation and asynchronous schedules'}


def test_all_settings_are_listed():
    """Of those that are refused: doctor's parser without Megatron knows them."""
    listed = settings()
    named = {'rerun_mode', 'optimizer_cpu_offload', 'moe_router_enable_expert_bias'}
    assert named | {'offload_modules', 'tp_comm_overlap'} <= {*listed}
    assert len({*listed}) == len(listed) and 'dist.use_decentralized_pg' not in listed


def test_one_place_asks():
    """Flags, doctor and Bridge by their facts, and the first call, give it settings alone."""
    askers = {'rules.REFUSALS': set(), 'refused(sources, ': set()}
    for file in (ROOT / 'megatron_zbpp').rglob('*.py'):
        for asked, found in askers.items():
            if asked in file.read_text():
                found.add(file.stem)
    assert askers['rules.REFUSALS'] == {'resolve'}
    assert askers['refused(sources, '] == {'resolve', 'preparation'}


class Backend(Enum):
    """As Megatron has one for attention."""

    flash = 1
    local = 2


def test_values_of_an_enum_are_their_names():
    (found,) = refused(SimpleNamespace(attention_backend=Backend.flash), True, **HOW)
    assert str(found).startswith('attention_backend=flash: ')
    assert not refused(SimpleNamespace(attention_backend=Backend.local), True, **HOW)


def test_the_first_source_that_has_a_setting_answers():
    """The model's config, the DDP's, then the arguments of NVIDIA's loop."""
    from megatron_zbpp.mcore.job.rules import REFUSALS, check

    off, on = SimpleNamespace(use_megatron_fsdp=False), SimpleNamespace(use_megatron_fsdp=True)
    for sources, wanted in (((off, on), []), ((object(), None, on), ['use_megatron_fsdp'])):
        found = check(replace(BASE, sources=sources), REFUSALS)
        assert [each.setting for each in found] == wanted


HOW = {'joins': True, 'in_order': True, 'splits': False}


def test_emulated_transformer_engine_can_more(monkeypatch, tmp_path):
    layers = SimpleNamespace(transformer_impl='transformer_engine', moe_grouped_gemm=True)
    assert len(list(refused(layers, on_cpu=True))) == 2
    assert not list(refused(layers, on_cpu=True, with_te=True))
    monkeypatch.setattr(te, '_CHECKOUT', tmp_path)  # a wheel has no kernels to emulate them with
    found = [each.reason for each in refused(layers, on_cpu=True)]
    assert len(found) == 2 and all('run from a checkout' in text for text in found)
    for recipe in ('tensorwise', 'blockwise', 'mxfp8'):
        fp8 = SimpleNamespace(fp8='hybrid', fp8_recipe=recipe)
        assert [r.setting for r in refused(fp8, on_cpu=True)] == ['fp8']
        found = [str(each) for each in refused(fp8, on_cpu=True, with_te=True)]
        cure = f'fp8_recipe={recipe}: its kernels need a GPU; give --fp8-recipe tensorwise'
        assert found == ([] if recipe == 'tensorwise' else [cure])
    flash = SimpleNamespace(attention_backend='flash', transformer_impl='inference_optimized')
    found = [each.setting for each in refused(flash, on_cpu=True, with_te=True)]
    assert found == ['transformer_impl', 'attention_backend']


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
    found = [each.setting for each in refused(args)]
    assert found == [f'{kind}_parallel_num_weight_shards' for kind in which]
    assert not list(refused(args, splits=False))


def test_a_graph_of_a_whole_iteration():
    """No W passes are asked for; and all that is refused is told."""
    args = SimpleNamespace(cuda_graph_impl='local', cuda_graph_scope=['full_iteration'])
    assert list(refused(args, splits=False))
    args = SimpleNamespace(cuda_graph_impl='local', tp_comm_overlap=True)
    assert len(list(refused(args))) == 2 and not list(refused(args, splits=False))


@pytest.mark.parametrize(
    ('rule', 'name'),
    [shown(*row, OF_RELEASES) for row in ROWS if row[0].when.text in OF_RELEASES],
)
def test_of_some_releases(rule, name):
    """The page of support has a line of those alone."""
    if not in_this_release(rule):
        pytest.skip('later releases of Megatron can')
    assert case_of(rule, name).said(rule)
