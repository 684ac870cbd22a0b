"""What Megatron-Core keeps to itself is in the installed release, and is what we take it for."""

import contextlib
import importlib
import inspect
import os
import sys
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.techniques import overlap

pytestmark = [pytest.mark.each_release, pytest.mark.on_ranks(2)]

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


@pytest.mark.parametrize(('path', 'names'), ATTRIBUTES.items())
def test_attributes(path, names):
    """The class makes them in its objects."""
    assert {*names} <= {*resolve_name(path).__init__.__code__.co_names}


def test_logged_losses():
    from megatron.core.transformer.moe import moe_utils

    record = getattr(moe_utils, 'save_to_aux_losses_tracker', None)
    if record is not None:
        record('load', torch.ones(()), 2, 3)
    else:
        moe_utils.get_moe_metrics_tracker().record('load', torch.ones(()), 2, 3)
    losses = compat.logged_losses()
    values = compat.logged_values(losses['load']).tolist()
    losses.clear()
    assert values == [0, 1, 0]


def batch_module(checkout):
    """Whether the module that is named defines the function; None: there is no training loop."""
    if checkout:
        sys.path.insert(0, checkout)
    with contextlib.suppress(ModuleNotFoundError):
        module = importlib.import_module(compat.get_batch_module())
        return getattr(module, compat.GET_BATCH).__module__ == module.__name__


def test_batch_module(ranks):
    checkout = os.environ.get('MEGATRON_LM')
    found = ranks(2).run(batch_module, checkout)
    if found == [None] * 2 and not checkout:
        pytest.skip('megatron.training is not here: MEGATRON_LM names a checkout')
    assert found == [True] * 2


def test_combined_step():
    """It is there, its streams ready, and takes what we give it."""
    from megatron.core.pipeline_parallel import utils

    utils._COMM_STREAM = None
    step = compat.combined_step(SimpleNamespace(high_priority_a2a_comm_stream=False))
    given = """forward_step_func config forward_data_store f_model_chunk_id is_first_microbatch
        current_microbatch collect_non_loss_data num_microbatches""".split()
    assert utils.get_comm_stream() is not None
    assert {*given, *overlap._ARGUMENTS} <= inspect.signature(step).parameters.keys()
