"""What is refused when a model is built, or first called."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from example import forget_groups
from supported import refuses

pytestmark = pytest.mark.each_release


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


def test_hybrid_model_where_it_is_built(ranks):
    assert ranks(2).run(hybrid_model, 'zb-h1', 1) == [[[1]], [[2]]]
    found = ranks(2).run(hybrid_model, 'zb-v', 2)
    if found != [None, None]:
        assert found == [[[2], [3]], [[1], [4]]], 'where the stages are'
        return
    for said in ranks(2).run(hybrid_model, 'zb-v', 1):
        assert said.startswith('MambaModel does not work with this schedule')
        assert 'such as zb-h1, or megatron-core from 0.17 on' in said


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


def first_call(schedule, config, of_ddp=None, of_loop=None):
    """What the first call says of settings of the model, of its DDP, and of NVIDIA's loop."""
    from unittest import mock

    from megatron_zbpp.mcore import compat
    from megatron_zbpp.mcore.iteration import preparation
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.settings import Settings

    model = SimpleNamespace(ddp_config=of_ddp and SimpleNamespace(**of_ddp))
    call = SimpleNamespace(models=[model], forward_only=False, num_microbatches=4)
    call.adjust_tensor_shapes_fn = None
    session = SimpleNamespace(programs=Programs(Settings(schedule)), faces=())
    args = of_loop and SimpleNamespace(**of_loop)
    with mock.patch.object(compat, 'training_arguments', lambda: args):
        try:
            preparation._allow(session, call, SimpleNamespace(**config), 2)
        except NotImplementedError as error:
            return str(error)
    return ''


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
def test_all_that_the_first_call_refuses_is_told_at_once(ranks, schedule, where, wanted):
    """Of each object that has settings."""
    said = ranks(2).run(first_call, schedule, *where)[0]
    assert bool(said) == bool(wanted) and all(each in said for each in wanted)
    assert not wanted or said.endswith(", or use Megatron's own schedule")
