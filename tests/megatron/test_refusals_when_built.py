"""What is refused by a script before it starts, when a model is built, or first called."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
from example import groups, small_config
from models import Job, train
from nvidia import COMMON, SCRIPT, known, launch, needs_training
from outcome import error_of, of_all, refusal
from ranks import RankError
from refused_settings import OF_SOME
from supported import refuses

import megatron_zbpp
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.iteration import preparation
from megatron_zbpp.mcore.iteration.preparation import refuse_unsupported
from megatron_zbpp.mcore.job.rules import REFUSALS, settings
from megatron_zbpp.mcore.layout import require_placed
from megatron_zbpp.mcore.options import ARGUMENTS
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import BY_FLAG, Settings


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


@pytest.mark.each_release
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
    said = error_of(refuse_unsupported, SimpleNamespace(), lambda *shapes: shapes, ())
    assert 'adjust_tensor_shapes_fn does not work' in said
    assert 'its shapes are for ranks, not for stages; use' in said


def mesh_of_fsdp():
    """What Megatron-FSDP says of the ranks of two pipelines of two."""
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as fsdp

    with groups(1, 2):
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        tensors = parallel_state.get_tensor_model_parallel_group()
        return error_of(fsdp._get_dp_tp_mesh, replicas, tensors)


@pytest.mark.each_release
def test_megatron_fsdp_has_no_pipelines(ranks):
    """Of its own: the refusal's reason. Where it has some, look whether ours can."""
    for said in ranks(4).run(mesh_of_fsdp):
        assert 'Shape mismatch, 4 != 2' in said


def not_laid_out(schedule, late):
    """What is said of a model whose config was made without a layout: built, or used, too late."""
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
        return error_of(build)


@pytest.mark.each_release
@pytest.mark.parametrize('late', [False, True], ids=['built', 'enabled late'])
def test_layers_must_be_laid_out(ranks, late):
    """Megatron would lay them out in a loop: another model than the schedule's."""
    for said in ranks(2).run(not_laid_out, 'zb-v', late):
        assert 'of this GPTModel are not laid out' in said
        assert 'pipeline_model_parallel_layout with 4 stages' in said
    assert ranks(2).run(not_laid_out, 'zb-interleaved', late) == [None, None]


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
        ('--transformer-impl inference_optimized', 'give --transformer-impl local'),
        ('--fp8-format e4m3', 'drop --fp8-format'),
        ('--attention-backend flash', 'attention_backend=flash: its kernels need a GPU'),
        ('--mtp-num-layers 1', 'give --untie-embeddings-and-output-weights'),
        ('--num-experts 2 --moe-grouped-gemm --moe-single-grouped-weight', 'single-grouped-weight'),
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
