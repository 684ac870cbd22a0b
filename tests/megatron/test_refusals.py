"""What is refused: by a rule before anything starts, whose cures cure (a row is its own test); by a
script before it starts, when a model is built, or first called."""

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from example import groups, small_config
from models import Job, train
from nvidia import COMMON, SCRIPT, known, launch, needs_training
from outcome import error_of, of_all, refusal
from paths import ROOT
from ranks import RankError
from refused_settings import (
    BASE,
    ELSE,
    OF_RELEASES,
    OF_SOME,
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

import megatron_zbpp
from megatron_zbpp.emulation import te
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.iteration import preparation
from megatron_zbpp.mcore.job.rules import CONDITIONS, REFUSALS, REFUSED, RULES, check, settings
from megatron_zbpp.mcore.layout import require_placed
from megatron_zbpp.mcore.options import ARGUMENTS
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import BY_FLAG, Settings

pytestmark = pytest.mark.each_release


ROWS = [(rule, name) for rule in RULES for name in rule.settings]
IDS = [f'{rule.effect}-{rule.when.text}-{name}' for rule, name in ROWS]


def shown(rule, name):
    """The row, and what the page of support says of it; nothing of what a GPU can."""
    lines = SHOWN | OF_RELEASES
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
    if rule.when.text in OF_RELEASES and not found:  # the page has a line of the others alone
        pytest.skip('later releases of Megatron can')


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


def test_the_first_source_that_has_a_setting_answers():
    """The model's config, the DDP's, then the arguments of NVIDIA's loop."""
    off, on = SimpleNamespace(use_megatron_fsdp=False), SimpleNamespace(use_megatron_fsdp=True)
    for sources, wanted in (((off, on), []), ((object(), None, on), ['use_megatron_fsdp'])):
        found = check(replace(BASE, sources=sources), REFUSALS)
        assert [each.setting for each in found] == wanted


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


def hybrid_model(schedule, chunks):
    """Numbers of the layers that each chunk of a hybrid model has on this rank; or what is said.
    None: this release has no chunks of hybrid models."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    own = {}
    try:  # from 0.17
        from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
        from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as Submodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model

        own['hybrid_layer_pattern'] = '|'.join('*' * 2 * chunks)
    except ImportError:
        from megatron.core.models.mamba import MambaModel as Model
        from megatron.core.ssm.mamba_block import MambaStack as Stack
        from megatron.core.ssm.mamba_block import MambaStackSubmodules as Submodules

        own['hybrid_override_pattern'] = '**'
        if chunks > 1:
            return None
    layers = Submodules(attention_layer=get_gpt_layer_local_spec())
    numbers = []
    with megatron_zbpp.enable(schedule), groups(1, 2, chunks):
        config = small_config(2 * chunks, p=2, chunks=chunks)
        for chunk in range(chunks):
            more = own if chunks == 1 else own | {'vp_stage': chunk}
            more |= {'pre_process': False, 'post_process': False}
            try:
                model = Model(config, ModuleSpec(Stack, submodules=layers), 32, 8, **more)
            except NotImplementedError as error:
                return str(error)
            numbers.append([layer.layer_number for layer in model.decoder.layers])
    return numbers


def test_hybrid_model_where_it_is_built(ranks):
    assert ranks(2).run(hybrid_model, 'zb-h1', 1) == [[[1]], [[2]]]
    found = ranks(2).run(hybrid_model, 'zb-v', 2)
    if found != [None, None]:
        assert found == [[[2], [3]], [[1], [4]]], 'where the stages are'
        assert ranks(2).run(hybrid_model, 'zb-interleaved', 2) == [[[1], [3]], [[2], [4]]]
        return
    for said in ranks(2).run(hybrid_model, 'zb-v', 1):
        assert said.startswith('MambaModel does not work with this schedule')
        assert 'such as zb-h1, or megatron-core from 0.17 on' in said


@pytest.mark.on_ranks(1)
@refuses('`adjust_tensor_shapes_fn` (distillation)', 'its shapes are for ranks, not for stages')
def test_shapes_of_ones_own():
    """A program sends tensors of those."""
    said = error_of(preparation.refuse_unsupported, SimpleNamespace(), lambda *shapes: shapes, ())
    assert 'adjust_tensor_shapes_fn does not work' in said
    assert 'its shapes are for ranks, not for stages; use' in said


@pytest.mark.on_ranks(4)
def test_megatron_fsdp_has_no_pipelines():
    """Of its own: the refusal's reason. Where it has some, look whether ours can."""
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as fsdp

    with groups(1, 2):
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        tensors = parallel_state.get_tensor_model_parallel_group()
        assert 'Shape mismatch, 4 != 2' in error_of(fsdp._get_dp_tp_mesh, replicas, tensors)


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize('late', [False, True], ids=['built', 'enabled late'])
@pytest.mark.parametrize('schedule', ['zb-v', 'zb-interleaved'])
def test_layers_must_be_laid_out(schedule, late):
    """Megatron would lay them out in a loop, which is another model than that of a V."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    def build():
        with nullcontext() if late else megatron_zbpp.enable(schedule):
            config = small_config(4, p=2, chunks=2)
            ends = {'pre_process': False, 'post_process': False, 'vp_stage': 0}
            model = GPTModel(config, get_gpt_layer_local_spec(), 32, 8, **ends)
        with megatron_zbpp.enable(schedule) as plugin:
            require_placed(model, plugin.session.programs.placement(2))

    with groups(1, 2, 2):
        said = error_of(build)
    if schedule == 'zb-interleaved':
        assert said is None
    else:
        assert 'of this GPTModel are not laid out' in said
        assert 'pipeline_model_parallel_layout with 4 stages' in said


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize(
    ('schedule', 'where', 'wanted'),
    [
        ('zb-h1', [{}], []),
        ('zb-h1', [{'tp_comm_overlap': 1, 'moe_paged_stash': 1}], ['moe_paged_stash', 'tp_comm']),
        ('zb-h1', [{}, {'use_megatron_fsdp': True}], ['use_megatron_fsdp=True']),
        (
            'pipedream',
            [{}, None, {'rerun_mode': 'report_stats', 'optimizer_cpu_offload': True}],
            ['optimizer_cpu_offload=True', 'rerun_mode=report_stats'],
        ),
        ('zb-h1', [{}, None, {'rerun_mode': 'report_stats', 'optimizer_cpu_offload': True}], []),
        ('gems', [{}, {'overlap_grad_reduce': True}], ['overlap_grad_reduce=True']),
    ],
    ids=str,
)
def test_all_that_the_first_call_refuses_is_told_at_once(schedule, where, wanted):
    """Of the model's config, of its DDP's, and of NVIDIA's loop."""
    config, of_ddp, of_loop = [*where, None, None][:3]
    model = SimpleNamespace(ddp_config=of_ddp and SimpleNamespace(**of_ddp))
    call = SimpleNamespace(models=[model], forward_only=False, num_microbatches=4)
    call.adjust_tensor_shapes_fn = None
    session = SimpleNamespace(programs=Programs(Settings(schedule)), faces=(), names=ARGUMENTS)
    args = of_loop and SimpleNamespace(**of_loop)
    with mock.patch.object(compat, 'training_arguments', lambda: args):
        said = error_of(preparation._allow, session, call, SimpleNamespace(**config), 2) or ''
    assert bool(said) == bool(wanted) and all(each in said for each in wanted)
    assert not wanted or said.endswith(", or use Megatron's own schedule")


@refuses('overlapped communication of experts', 'forward_step makes no plan', 'dualpipe-v')
def test_a_program_whose_forward_step_makes_no_plan(ranks, data):
    job = Job('hidden all-to-all', te=False, bf16=True, dp=2, ep=2)
    with pytest.raises(RankError, match='the forward_step function takes no return_schedule_plan'):
        ranks(4).run(train, job, job.argv('dualpipe-v', False, data))


OURS = {f'--pipeline-{name}' for name in ('offload', 'vocab-parallel', 'dropout-seeds')}


@needs_training
def test_each_exists(ranks):
    """In this release; or it is known to be of others."""
    found, _ = ranks(2).run(known)
    cures = BY_FLAG.fill(' '.join(rule.cure for rule in REFUSALS))
    wanted = {*settings(), *re.findall(r'--[a-z0-9-]+', cures)}
    assert '--no-rope-fusion' in wanted
    assert wanted - found <= {*OF_SOME, *OURS}


@needs_training
@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ('--fp8-format e4m3', 'drop --fp8-format'),
        ('--attention-backend flash', 'attention_backend=flash: its kernels need a GPU'),
        ('--mtp-num-layers 1', 'give --untie-embeddings-and-output-weights'),
        ('--pipeline-schedule zb-w', "unknown schedule 'zb-w'"),
        ('--yaml-cfg nowhere.yaml', '--yaml-cfg'),
    ],
)
def test_refused_by_the_script(ranks, flags, said):
    """In one line, which one rank says."""
    own = '--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule zb-v'
    found = of_all(ranks(2).run(launch, *COMMON, *own.split(), *flags.split()))
    assert said in refusal(found, SCRIPT.name)
