"""Which optimizers step early, and that Megatron's code is what we take it for."""

import inspect
import io
from contextlib import redirect_stderr
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from supported import WAITS, supports

from megatron_zbpp.mcore.iteration.stages import Arguments
from megatron_zbpp.mcore.optimizer import split_step
from megatron_zbpp.mcore.optimizer.early_steps import EarlySteps, ForwardsAhead
from megatron_zbpp.mcore.patches import training_loop

pytestmark = [pytest.mark.each_release, pytest.mark.on_ranks(2)]


OF_OPTIMIZER = 'optimizer_cpu_offload', 'optimizer_cuda_graph', 'fp8_param_gather'
READ_BY_LOOP = (
    'save_activations_interval',
    'save_tokens_per_expert_interval',
    'save_dgrads_interval',
    'log_max_attention_logit',
    'qk_clip',
)
TYPES = 'main_params_dtype', 'exp_avg_dtype', 'exp_avg_sq_dtype'
SETTINGS = {f'`{name}`': ([True], [False, None]) for name in (*OF_OPTIMIZER, *READ_BY_LOOP)}
SETTINGS |= {
    f'`{name}` in fp16 or FP8': ([torch.float16, torch.uint8], [torch.float32, torch.bfloat16])
    for name in TYPES
}


def refused(name, value):
    """What is said of a setting of the loop, or of an optimizer and of a chain of it alone."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    settings = SimpleNamespace(**{name: value}, use_precision_aware_optimizer=True)
    if name in READ_BY_LOOP:
        with mock.patch.object(split_step.compat, 'training_arguments', lambda: settings):
            return [split_step.refusal_of_loop()]
    leaf = FP32Optimizer.__new__(FP32Optimizer)
    leaf.is_stub_optimizer = name == 'stub'
    leaf.config = leaf.ddp_config = settings
    return [split_step.refusal(ChainedOptimizer([leaf])), split_step.refusal(leaf)]


@supports('steps validated later: {setting}', 'any+post-validation', WAITS)
@pytest.mark.parametrize('setting', SETTINGS)
def test_settings_that_wait_are_named(setting):
    name, (waits, early) = setting.split('`')[1], SETTINGS[setting]
    for value in waits:
        assert all(reason.startswith(f'{name}=') for reason in refused(name, value))
    for value in early:
        assert not any(refused(name, value))


def test_optimizers_that_wait_are_named():
    """A rank without parameters, and what nobody knows."""
    assert 'no parameters' in refused('stub', True)[0]
    said = split_step.refusal(SimpleNamespace(config=None))
    assert 'SimpleNamespace is not one of FP32Optimizer' in said


def built(kind, *settings):
    """What is said of a real optimizer of Megatron that has these settings."""
    from megatron.core.optimizer import OptimizerConfig, layer_wise_optimizer, optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    if kind == 'graph' and not hasattr(OptimizerConfig, 'optimizer_cuda_graph'):
        return 'absent'
    config = OptimizerConfig(lr=0.1, **({'optimizer_cuda_graph': True} if kind == 'graph' else {}))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = ProcessGroupCollection(dp_cp=alone, expt_dp=alone)

    def leaf():
        adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
        return optimizer.FP32Optimizer(adam, config, lambda *_: None)

    def layer_wise():
        return layer_wise_optimizer.LayerWiseDistributedOptimizer([leaf()], config, groups)

    made = {
        'one': leaf,
        'graph': leaf,
        'several': lambda: optimizer.ChainedOptimizer([leaf(), leaf()]),
        'layer-wise': layer_wise,
        'layer-wise beside another': lambda: optimizer.ChainedOptimizer([layer_wise(), leaf()]),
    }[kind]()
    for name in settings:
        if not hasattr(made, name):
            return 'absent'
        setattr(made, name, True)
    return split_step.refusal(made)


@pytest.mark.parametrize('kind', ['one', 'several', 'layer-wise', 'layer-wise beside another'])
def test_optimizers_that_may_be_early(kind):
    assert built(kind) is None


def test_muon_that_gathers_into_gradients_is_refused(ranks):
    """Which the true step needs still when forwards run early; in DDP's buffers it may be early."""
    for reason in ranks(2).run(built, 'layer-wise', 'overlap_param_gather'):
        if reason == 'absent':
            pytest.skip('from 0.18 on')
        assert reason.startswith('overlap_param_gather: ')
    in_buffers = 'use_buffer_param_sync', 'overlap_param_gather'
    assert ranks(2).run(built, 'layer-wise', *in_buffers) == [None] * 2


def test_a_captured_step_is_refused(ranks):
    reason = ranks(2).run(built, 'graph')[0]
    if reason == 'absent':
        pytest.skip('this Megatron-Core captures no step: from 0.19 on')
    assert reason.startswith('optimizer_cuda_graph=')


def test_delayed_scaling():
    def said(recipe):
        return split_step.refusal_of_model(SimpleNamespace(fp8='hybrid', fp8_recipe=recipe))

    assert 'delayed' in said('delayed') and said('tensorwise') is None


def test_clipping_and_rounding_are_megatrons():
    from megatron.core.optimizer import clip_grads

    source = inspect.getsource(clip_grads.clip_grad_by_total_norm_fp32)
    assert 'max_norm / (total_norm + 1.0e-6)' in source and 'clip_coeff < 1.0' in source
    rounded = [training_loop._as_float32(value) for value in (0.1, None, 1e9 + 1)]
    assert rounded == [torch.tensor(0.1).item(), None, torch.tensor(1e9 + 1).item()]


def test_several_optimizers_wait():
    """Two take turns: until the first is gone, then there is one."""

    class Optimizer:
        pass

    steps = EarlySteps(SimpleNamespace(), SimpleNamespace())
    steps._agree = lambda optimizer, call: True
    one, other = Optimizer(), Optimizer()
    found = [steps._possible_for(optimizer, None) for optimizer in (one, one, other, one)]
    assert found == [True, True, False, False]
    del one
    assert steps._possible_for(other, None)


def differing():
    """What is said after calls with the same method, with another function, and with a third."""

    class Script:
        def forward_step(self):
            pass

    script, model, said = Script(), object(), []
    following = ForwardsAhead(SimpleNamespace(post_validation=True))
    sizes = {'num_microbatches': 2, 'seq_length': 1, 'micro_batch_size': 1}
    for function in (script.forward_step, script.forward_step, differing, refused):
        with redirect_stderr(io.StringIO()) as written:
            following.take(
                Arguments(forward_step_func=function, data_iterator=None, model=model, **sizes)
            )
        said.append(written.getvalue())
    return said


def test_calls_that_differ_are_named(ranks):
    """Once; a method is the same function each time."""
    said, other = ranks(2).run(differing)
    assert 'forward_step_func is not the one of the iteration before' in said[2]
    assert said[:2] + said[3:] == [''] * 3 and other == [''] * 4
