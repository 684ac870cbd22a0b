"""What Megatron-Core keeps to itself is in the installed release, and is what we take it for."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.each_release

# what the functions of `compat` read of objects, by class
ATTRIBUTES = {
    'megatron.core.optimizer.distrib_optimizer:DistributedOptimizer': (
        'shard_fp32_from_float16_groups',
        'shard_float16_groups',
    ),
    'megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params': (
        'fp32_from_float16_groups',
        'float16_groups',
    ),
    'megatron.core.distributed:DistributedDataParallel': (
        'bucket_groups',
        'expert_parallel_bucket_groups',
    ),
    'megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup': (
        'param_gather_handle',
        'param_gather_dispatched',
    ),
}


def missing(path, names):
    """The names that the class does not make in its objects."""
    from pkgutil import resolve_name

    made = resolve_name(path).__init__.__code__.co_names
    return [name for name in names if name not in made]


@pytest.mark.parametrize(('path', 'names'), ATTRIBUTES.items())
def test_attributes(ranks, path, names):
    assert ranks(2).run(missing, path, names) == [[]] * 2


def states():
    """Whether random states that are set back give the same numbers again, tracked ones too."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_zbpp.mcore import compat

    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add('ours', 1)

    def drawn():
        with tracker.fork('ours'):
            tracked = torch.rand(2)
        return torch.cat([torch.rand(2), tracked])

    host, device, tracked = compat.random_states()
    tracked = {name: state.clone() for name, state in tracked.items()}
    before = drawn()
    compat.set_random_states(host, device, tracked)
    same = torch.equal(before, drawn())
    tracker.reset()
    return same


def test_random_states(ranks):
    assert ranks(2).run(states) == [True] * 2


def ranges():
    """Whether Megatron's ranges are asked for, before a program does so and after."""
    from megatron.core.utils import configure_nvtx_profiling

    from megatron_zbpp.mcore import compat

    before = compat.nvtx_enabled()
    configure_nvtx_profiling(True)
    asked = compat.nvtx_enabled()
    configure_nvtx_profiling(False)
    return before, asked


def test_ranges(ranks):
    assert ranks(2).run(ranges) == [(False, True)] * 2


def backward():
    """Whether `backward_step` takes behind the tensors what we give it."""
    import inspect

    import torch
    from megatron.core.pipeline_parallel import schedules

    from megatron_zbpp.mcore import compat

    model = torch.nn.Linear(1, 1)
    model.model_type = 'one'
    given = compat.backward_arguments(model, 'its config')
    bound = inspect.signature(schedules.backward_step).bind(None, None, None, *given)
    return bound.arguments['config']


def test_backward_arguments(ranks):
    assert ranks(2).run(backward) == ['its config'] * 2


def logged():
    """What a router's loss that is logged by Megatron's own function reads as."""
    import torch
    from megatron.core.transformer.moe import moe_utils

    from megatron_zbpp.mcore import compat

    record = getattr(moe_utils, 'save_to_aux_losses_tracker', None)
    if record is not None:
        record('load', torch.ones(()), 2, 3)
    else:
        moe_utils.get_moe_metrics_tracker().record('load', torch.ones(()), 2, 3)
    losses = compat.logged_losses()
    values = compat.logged_values(losses['load']).tolist()
    losses.clear()
    return values


def test_logged_losses(ranks):
    assert ranks(2).run(logged) == [[0, 1, 0]] * 2


def batch_module(checkout):
    """Whether the module that is named defines the function; None: there is no training loop."""
    import importlib
    import sys

    from megatron_zbpp.mcore import compat

    if checkout:
        sys.path.insert(0, checkout)
    try:
        module = importlib.import_module(compat.get_batch_module())
    except ModuleNotFoundError:
        return None
    return getattr(module, compat.GET_BATCH).__module__ == module.__name__


def test_batch_module(ranks):
    checkout = os.environ.get('MEGATRON_LM')
    found = ranks(2).run(batch_module, checkout)
    if found == [None] * 2 and not checkout:
        pytest.skip('megatron.training is not here: MEGATRON_LM names a checkout')
    assert found == [True] * 2


def combined_step_takes():
    """Whether Megatron's combined step is there, its streams ready, and takes what we give it."""
    import inspect
    from types import SimpleNamespace

    from megatron.core.pipeline_parallel import utils

    from megatron_zbpp.mcore import compat
    from megatron_zbpp.mcore.techniques import overlap

    utils._COMM_STREAM = None
    step = compat.combined_step(SimpleNamespace(high_priority_a2a_comm_stream=False))
    given = {'forward_step_func', 'config', 'forward_data_store', *overlap._ARGUMENTS}
    given |= {'f_model_chunk_id', 'is_first_microbatch', 'current_microbatch'}
    given |= {'collect_non_loss_data', 'num_microbatches'}
    return utils.get_comm_stream() is not None, given - inspect.signature(step).parameters.keys()


def test_combined_step(ranks):
    assert ranks(2).run(combined_step_takes) == [(True, set())] * 2
