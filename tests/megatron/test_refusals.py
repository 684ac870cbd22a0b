"""What is refused exists, is refused by name before anything starts, and has a cure that exists."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from example import forget_groups
from nvidia import CHECKOUT, COMMON, SCRIPT, forget, known, needs_training
from outcome import of_all, outcome, refusal
from paths import ROOT
from supported import absent, refuses

from megatron_zbpp.emulation import te
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import refusals

# settings and flags of some releases only: of which
OF_SOME = {
    'use_legacy_models': 'until 0.17',
    '--use-legacy-models': 'until 0.17',
    'overlap_dispatch_backward_with_experts_wgrad': 'from 0.18',
    '--overlap-dispatch-backward-with-experts-wgrad': 'from 0.18',
    'logits_load_dir': 'from 0.19',
    'moe_paged_stash': 'from 0.19',
    '--moe-paged-stash': 'from 0.19',
    'use_transformer_engine_op_fuser': 'from 0.17',
    '--use-transformer-engine-op-fuser': 'from 0.17',
    'tensor_parallel_num_weight_shards': 'from 0.19',
    '--tensor-parallel-num-weight-shards': 'from 0.19',
    'expert_tensor_parallel_num_weight_shards': 'from 0.19',
    '--expert-tensor-parallel-num-weight-shards': 'from 0.19',
    'moe_single_grouped_weight': 'from 0.18',
    '--moe-single-grouped-weight': 'from 0.18',
    'moe_single_grouped_bias': 'from 0.18',
    '--moe-single-grouped-bias': 'from 0.18',
    'moe_use_grouped_tensor': 'from 0.20',
    '--moe-use-grouped-tensor': 'from 0.20',
    'hybrid_layer_pattern': 'from 0.17',
    'hybrid_attention_ratio': 'until 0.16',
    'hybrid_mlp_ratio': 'until 0.16',
    'modelopt_enabled': 'scripts add it',
    '--modelopt-enabled': 'scripts add it',
    'export_kd_teacher_load': 'scripts add it',
    '--export-kd-teacher-load': 'scripts add it',
}
# values that are refused, where it is not any
VALUES = {
    'cuda_graph_impl': ['local', 'transformer_engine', 'full_iteration'],
    'transformer_impl': ['transformer_engine', 'inference_optimized'],
    'attention_backend': ['flash', 'fused', SimpleNamespace(name='flash')],
    'context_parallel_size': [2],
    'fp8_recipe': ['mxfp8'],
    'tensor_parallel_num_weight_shards': [2, '2'],
    'expert_tensor_parallel_num_weight_shards': [2],
    'hybrid_layer_pattern': ['M*|M-|M*|M-'],
    'hybrid_override_pattern': ['M*M-'],
    'hybrid_attention_ratio': [0.5],
    'hybrid_mlp_ratio': [0.25],
}
HARMLESS = {
    'cuda_graph_impl': ['none', None],
    'transformer_impl': ['local'],
    'attention_backend': ['auto', 'unfused', SimpleNamespace(name='local')],
    'context_parallel_size': [1],
    'tensor_parallel_num_weight_shards': [None, 1],
    'expert_tensor_parallel_num_weight_shards': [None, 1],
}
_TWICE = 'a forward that runs again would enter its largest values a second time'
_CAPTURED = 'a captured forward cannot run again with other random states'
HYBRID = [s for s in refusals.settings() if s.startswith('hybrid_') and 'context' not in s]
# but for what is refused with others, or by some releases, only
OF_SLICES = ['variable_seq_lengths', 'experimental_attention_variant', 'logits_load_dir']
OF_SLICES += ['moe_expert_capacity_factor']
OF_REPLICAS = ['overlap_grad_reduce', 'overlap_param_gather', 'expert_model_parallel_size']
OF_REPLICAS += ['moe_router_load_balancing_type']
OTHERS = ['fp8_recipe', 'mtp_num_layers', 'sft', 'reset_attention_mask', *HYBRID, *OF_SLICES]
OF_SHARDS = ['use_mup', 'defer_embedding_wgrad_compute', 'init_model_with_meta_device']
OTHERS += [*OF_REPLICAS, *OF_SHARDS, 'cross_entropy_fusion_impl']
OTHERS += ['untie_embeddings_and_output_weights']
WITHOUT_TE = [s for s in refusals.settings() if s not in OTHERS]
CASES = [(setting, value) for setting in WITHOUT_TE for value in VALUES.get(setting, [1])]


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


@pytest.mark.parametrize(
    'setting', [*OF_SLICES, 'mtp_num_layers', 'sft', refusals.OVERLAP, 'export_kd_teacher_load']
)
def test_refused_with_slices(setting):
    how = {'placement': Placement.loop(2), 'joins': True}
    given = SimpleNamespace(**{setting: 1})
    assert not [*refusals.refused(given, **how)]
    (found,) = refusals.refused(given, techniques={'sliced'}, **how)
    assert found.setting == setting and found.cure.endswith('a schedule of whole sequences')


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


# of flags whose setting has another name, what they set; of cures without a flag
FLAGS = {
    '--fp8-format': ['fp8'],
    '--fp4-format': ['fp4'],
    '--cpu-offloading-num-layers': ['cpu_offloading', 'cpu_offloading_num_layers'],
    '--rope-fusion': ['apply_rope_fusion'],
}
INSTEAD = ('use_megatron_fsdp', 'use_torch_fsdp2')  # of which --use-distributed-optimizer is
ALIKE = 'num_microbatches_with_partial_activation_checkpoints'


def test_one_place_asks():
    """Flags, doctor, Bridge and the first call give it their settings alone."""
    askers = {'refusals.refused(': set(), 'preflight.refused(': set()}
    for file in (ROOT / 'megatron_zbpp').rglob('*.py'):
        for asked, found in askers.items():
            if asked in file.read_text():
                found.add(file.stem)
    assert askers['refusals.refused('] == {'preflight'}
    assert askers['preflight.refused('] == {'arguments', 'dry_run', 'bridge', 'preparation'}


def cured(settings, found):
    """The settings with what the cure names first done: a flag dropped, or given a value."""
    values = dict(vars(settings))
    if words := re.search(r'\b(drop|give|use) --(no-)?([a-z0-9-]+)(?: ([a-z0-9_]+))?', found.cure):
        what, no, name, value = words.groups()
        names = FLAGS.get(f'--{name}', [name.replace('-', '_')])
        given = None if what == 'drop' or no else value or True
        given = int(given) if isinstance(given, str) and given.isdigit() else given
        values |= dict.fromkeys(names, given)
        values |= {found.setting: None} if found.setting in INSTEAD else {}
    elif found.setting == ALIKE:  # recompute all alike
        values[ALIKE] = None
    return SimpleNamespace(**values)


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


@needs_training
def test_each_exists(ranks):
    """In this release; or it is known to be of others."""
    found, _ = ranks(2).run(known)
    cures = ' '.join(
        str(each)
        for each in refusals.refused(SimpleNamespace(**dict(CASES)), True, placement=Placement.v(2))
    )
    wanted = {*refusals.settings(), *re.findall(r'--[a-z0-9-]+', cures)}
    assert '--no-rope-fusion' in wanted
    assert wanted - found <= {*OF_SOME, '--pipeline-offload'}  # ours


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
        ('--mtp-num-layers 1', 'give --untie-embeddings-and-output-weights'),
        ('--tp-comm-overlap', 'drop --tp-comm-overlap'),
        ('--cuda-graph-impl local', 'give --cuda-graph-impl none'),
        ('--use-megatron-fsdp', 'use --use-distributed-optimizer'),
        ('--cpu-offloading-num-layers 1', 'drop --cpu-offloading-num-layers'),
        ('--fine-grained-activation-offloading', 'drop --fine-grained-activation-offloading'),
        ('--tensor-parallel-num-weight-shards 2', 'drop --tensor-parallel-num-weight-shards'),
        ('--num-experts 2 --moe-grouped-gemm --moe-single-grouped-weight', 'single-grouped-weight'),
        ('--use-transformer-engine-op-fuser', 'drop --use-transformer-engine-op-fuser'),
        ('--use-torch-fsdp2', 'use --use-distributed-optimizer'),
        ('--overlap-moe-expert-parallel-comm', 'take dualpipe-v, or drop --overlap-moe-expert'),
        ('--pipeline-schedule zb-w', "unknown schedule 'zb-w'"),
        ('--yaml-cfg nowhere.yaml', '--yaml-cfg'),
        ('--use-checkpoint-args', 'give the arguments of the checkpoint as flags'),
    ],
)
def test_refused_by_the_script(ranks, flags, said):
    for flag in {*flags.split()} & {*OF_SOME}:
        if flag not in ranks(2).run(known)[0]:
            pytest.skip(f'{flag} is in Megatron {OF_SOME[flag]}')
    own = '--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule zb-v'
    found = of_all(ranks(2).run(launch, *COMMON, *own.split(), *flags.split()))
    assert said in refusal(found, SCRIPT.name)


@pytest.mark.parametrize('placement', [Placement.loop(2), Placement.loop(2, 3), Placement.v(1)])
def test_hybrid_models_in_loops(placement):
    args = SimpleNamespace(hybrid_layer_pattern='M*|M-')
    assert not list(refusals.refused(args, placement=placement))


def hybrid_model(schedule, chunks):
    """Numbers of the layers that each chunk of a hybrid model has on this rank; or what is said.

    None: this release has no chunks of hybrid models.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

    import megatron_zbpp

    virtual = chunks if chunks > 1 else None
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
    try:
        with megatron_zbpp.enable(schedule):
            parallel_state.initialize_model_parallel(
                1, 2, virtual_pipeline_model_parallel_size=virtual
            )
            model_parallel_cuda_manual_seed(1)
            config = TransformerConfig(
                num_layers=2 * chunks,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=virtual,
                pipeline_dtype=torch.float32,
            )
            stack = ModuleSpec(
                Stack, submodules=Submodules(attention_layer=get_gpt_layer_local_spec())
            )
            numbers = []
            for chunk in range(chunks):
                more = own if virtual is None else own | {'vp_stage': chunk}
                model = Model(config, stack, 32, 8, pre_process=False, post_process=False, **more)
                numbers.append([layer.layer_number for layer in model.decoder.layers])
        return numbers
    except NotImplementedError as error:
        return str(error)
    finally:
        forget_groups()


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
    found = [*refusals.refused(asked, techniques={'dropout_seeds'}, **how)]
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


def test_hybrid_model_where_it_is_built(ranks):
    assert ranks(2).run(hybrid_model, 'zb-h1', 1) == [[[1]], [[2]]]
    found = ranks(2).run(hybrid_model, 'zb-v', 2)
    if found != [None, None]:
        assert found == [[[2], [3]], [[1], [4]]], 'where the stages are'
        return
    for said in ranks(2).run(hybrid_model, 'zb-v', 1):
        assert said.startswith('MambaModel does not work with this schedule')
        assert 'such as zb-h1, or megatron-core from 0.17 on' in said


def test_without_w_passes_more_may_be():
    experts = {'overlap_dispatch_backward_with_experts_wgrad': True}
    args = SimpleNamespace(tp_comm_overlap=True, cuda_graph_impl='local', **experts)
    found = [str(each) for each in refusals.refused(args)]
    assert len(found) == 3 and all('1f1b' in each for each in found)
    assert not list(refusals.refused(args, splits=False))
    args = SimpleNamespace(cuda_graph_impl='local', cuda_graph_scope=['full_iteration'])
    assert list(refusals.refused(args, splits=False))


def shapes_of_ones_own():
    """What is said of a program that sends tensors of its own shapes."""
    from megatron_zbpp.mcore.iteration.preparation import refuse_unsupported

    try:
        refuse_unsupported(SimpleNamespace(), lambda *shapes: shapes, ())
    except NotImplementedError as error:
        return str(error)


@refuses('`adjust_tensor_shapes_fn` (distillation)', 'its shapes are for ranks, not for stages')
def test_shapes_of_ones_own(ranks):
    said = ranks(2).run(shapes_of_ones_own)[0]
    assert 'adjust_tensor_shapes_fn does not work' in said
    assert 'its shapes are for ranks, not for stages; use' in said


def mesh_of_fsdp():
    """What Megatron-FSDP says of the ranks of two pipelines of two."""
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as fsdp

    try:
        parallel_state.initialize_model_parallel(1, 2)
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        fsdp._get_dp_tp_mesh(replicas, parallel_state.get_tensor_model_parallel_group())
    except Exception as error:
        return str(error)
    finally:
        forget_groups()
    return None


def test_megatron_fsdp_has_no_pipelines(ranks):
    """Of its own: the refusal's reason. Where it has some, look whether ours can."""
    for said in ranks(4).run(mesh_of_fsdp):
        assert 'Shape mismatch, 4 != 2' in said


def test_hybrid_model_in_chunks(ranks):
    found = ranks(2).run(hybrid_model, 'zb-interleaved', 2)
    if found == [None, None]:
        pytest.skip('hybrid models have chunks from 0.17 on')
    assert found == [[[1], [3]], [[2], [4]]]


def not_laid_out(schedule, late):
    """What is said of a model whose config was made without a layout: built, or used, too late."""
    from contextlib import nullcontext

    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    import megatron_zbpp
    from megatron_zbpp.mcore.layout import require_placed

    try:
        parallel_state.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2)
        model_parallel_cuda_manual_seed(1)
        with nullcontext() if late else megatron_zbpp.enable(schedule):
            config = TransformerConfig(
                num_layers=4,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=2,
                pipeline_dtype=torch.float32,
            )
            ends = {'pre_process': False, 'post_process': False, 'vp_stage': 0}
            model = GPTModel(config, get_gpt_layer_local_spec(), 32, 8, **ends)
        with megatron_zbpp.enable(schedule) as plugin:
            require_placed(model, plugin.session.programs.placement(2))
    except ValueError as error:
        return str(error)
    finally:
        forget_groups()


@pytest.mark.parametrize('late', [False, True], ids=['built', 'enabled late'])
def test_layers_must_be_laid_out(ranks, late):
    """Megatron would lay them out in a loop: another model than the schedule's."""
    for said in ranks(2).run(not_laid_out, 'zb-v', late):
        assert 'of this GPTModel are not laid out' in said
        assert 'pipeline_model_parallel_layout with 4 stages' in said
    assert ranks(2).run(not_laid_out, 'zb-interleaved', late) == [None, None]
