"""Differences of Megatron-Core's releases, and names that it keeps to itself.

Releases are told apart by features and not by version strings. A test holds that the installed one
has what is used here; the registry of patches holds the rest, which is replaced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import rerun_state_machine, utils
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.pipeline_parallel import (
    combined_1f1b,
    fine_grained_activation_offload,
    schedules,
)
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

SELECT_SEGMENT = 'select_pipeline_segment'
GET_BATCH = 'get_batch_on_this_tp_rank'
# Transformer Engine's kernel, in `clip_grads`: with megatron-core 0.19, if it has one
SCALE_BY_TENSOR = 'multi_tensor_scale_tensor_impl'

# what Megatron's two pipelined functions, and the reduction behind them, read from a collection
_GROUPS = ('tp', 'cp', 'embd', 'pos_embd', 'pp', 'dp_cp', 'tp_dp_cp', 'dp')

# (host's, device's, tracked by name)
random_states = random._get_all_rng_states
set_random_states = random._set_all_rng_states


@functools.cache
def takes(function: Callable, parameter: str) -> bool:
    """Return True if `function` has a parameter of that name."""
    return parameter in inspect.signature(function).parameters


def training_arguments() -> Any:
    """Return the arguments of NVIDIA's loop; None: another loop trains, or it has not begun."""
    return getattr(sys.modules.get('megatron.training.global_vars'), '_GLOBAL_ARGS', None)


def rerun_mode() -> str | None:
    """Return how NVIDIA's loop runs iterations again, after faults or to compare; None: never."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    mode = None if machine is None else machine.get_mode()
    return None if mode in (None, rerun_state_machine.RerunMode.DISABLED) else mode.value


@contextmanager
def another_rerun_machine() -> Iterator[None]:
    """Let loss functions check their results by a machine of which nothing is kept."""
    own = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if own is not None:
        rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE = rerun_state_machine.RerunStateMachine()
    try:
        yield
    finally:
        rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE = own


def tells_all_stages_of_sequences() -> bool:
    """Return True if NVIDIA's batches tell each stage where packed sequences end: from 0.19 on."""
    batches = getattr(utils, GET_BATCH, None)
    return batches is not None and takes(batches, 'has_cu_seqlens')


def tensor_shapes(groups: Any, **sizes: Any) -> list[Any]:
    """Return the shapes of what neighbours exchange, told by Megatron, with the groups it asks."""
    make = schedules.get_tensor_shapes
    named = {f'{name}_group': getattr(groups, name) for name in ('tp', 'cp', 'pp')}
    return make(**sizes, **{name: group for name, group in named.items() if takes(make, name)})


def _imported(name: str) -> Any:
    """Return a module of Megatron; None: this release has none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


@functools.cache
def segments_module() -> str | None:
    """Return where hybrid models ask for the layers of a stage, from 0.17 on; None: nowhere."""
    names = (
        'megatron.core.models.hybrid.hybrid_layer_allocation',
        'megatron.core.ssm.mamba_hybrid_layer_allocation',
    )
    return next((name for name in names if hasattr(_imported(name), SELECT_SEGMENT)), None)


def models_and_stacks() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return module and class of the models whose layers stages share out, and of their stacks."""
    models = 'megatron.core.models'
    hybrid = f'{models}.hybrid.hybrid_model', 'HybridModel'
    stack = f'{models}.hybrid.hybrid_block', 'HybridStack'
    if importlib.util.find_spec(f'{models}.hybrid') is None:
        hybrid = f'{models}.mamba.mamba_model', 'MambaModel'
        stack = 'megatron.core.ssm.mamba_block', 'MambaStack'
    plain = (f'{models}.gpt.gpt_model', 'GPTModel'), (f'{models}.bert.bert_model', 'BertModel')
    block = 'megatron.core.transformer.transformer_block', 'TransformerBlock'
    return [*plain, hybrid], [block, stack]


def hybrid_model() -> str | None:
    """Return the module of `HybridModel`; None: this release has none, as until 0.17."""
    return getattr(_imported('megatron.core.models.hybrid.hybrid_model'), '__name__', None)


def backward_arguments(model: torch.nn.Module, config: Any) -> tuple[Any, ...]:
    """Return the arguments of `backward_step` behind the tensors."""
    if takes(schedules.backward_step, 'model_type'):  # until 0.16
        return schedules.get_model_type(model), config
    return (config,)


def combined_step(config: Any) -> Callable:
    """Return Megatron's combined step, its streams made ready as `config` asks."""
    priority = takes(pipeline_utils.set_streams, 'high_priority')  # from 0.18
    streams = {'high_priority': config.high_priority_a2a_comm_stream} if priority else {}
    pipeline_utils.set_streams(**streams)
    return combined_1f1b.combined_forward_backward_step


def forgets_modules_that_stay() -> bool:
    """Return True if Megatron's own offloading forgets what stays: 0.19 at the latest, not 0.16."""
    return takes(fine_grained_activation_offload.ChunkOffloadHandler.bulk_offload, 'name')


def default_groups() -> ProcessGroupCollection:
    """Return the process groups of a program that gives none to a forward_backward function."""
    build: Callable | None = getattr(schedules, '_build_default_pg_collection', None)  # from 0.19
    return build() if build else ProcessGroupCollection.use_mpu_process_groups(list(_GROUPS))


def get_batch_module() -> str:
    """Return the module that defines `GET_BATCH`: since 0.18 in the core."""
    return utils.__name__ if hasattr(utils, GET_BATCH) else 'megatron.training.utils'


def nvtx_enabled() -> bool:
    """Return True if a program has asked for Megatron's ranges by `configure_nvtx_profiling`."""
    return utils._nvtx_enabled


def logged_losses() -> dict[str, Any]:
    """Return the auxiliary losses that routers of experts log, by name."""
    metrics: Callable | None = getattr(moe_utils, 'get_moe_metrics_tracker', None)  # from 0.18
    if metrics is not None:
        return metrics()._metrics
    return moe_utils.get_moe_layer_wise_logging_tracker()


def logged_values(entry: Any) -> torch.Tensor:
    """Return the values of an entry of `logged_losses`."""
    return entry['values'] if isinstance(entry, dict) else entry.values


def logged_mtp_losses() -> dict[str, Any]:
    """Return the losses that multi-token prediction logs: tensors by name, and groups."""
    return MTPLossLoggingHelper.tracker


def model_copies(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each parameter that `optimizer` steps in float32, and its copy in the model."""
    if isinstance(optimizer, DistributedOptimizer):
        stepped, copies = optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        stepped, copies = optimizer.fp32_from_float16_groups, optimizer.float16_groups
    else:
        return
    for parameters, theirs in zip(stepped, copies, strict=True):
        yield from zip(parameters, theirs, strict=True)


def gradient(optimizer: MegatronOptimizer, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient by which `optimizer` steps the parameter, maybe of another type."""
    if getattr(optimizer.config, 'use_precision_aware_optimizer_no_fp8_or_ds_fp8', False):
        return getattr(parameter, 'decoupled_grad', None)
    return parameter.grad


def shares_out_layers(optimizer: MegatronOptimizer) -> bool:
    """Return True if its ranks step some layers each and then gather all: Muon's, and its like."""
    return type(optimizer) is LayerWiseDistributedOptimizer


def gathers_buffers(optimizer: MegatronOptimizer) -> bool:
    """Return True if DDP gathers the stepped shards in the buffers of its model chunks.

    So it is with the distributed optimizer, and with layers that ranks share out where they lie in
    buffers cut for that: possible from 0.18 on, done by NVIDIA's script from 0.20 on.
    """
    cut = getattr(optimizer, 'use_buffer_param_sync', False)
    return cut or isinstance(optimizer, DistributedOptimizer)


def gathers_layers(optimizer: MegatronOptimizer) -> bool:
    """Return True if its ranks gather by themselves the layers that they share out."""
    return shares_out_layers(optimizer) and not gathers_buffers(optimizer)


def ddp_buffers(chunk: Any) -> list[Any]:
    """Return the memory of gradients and parameters; none, where DDP does not wrap the chunk."""
    if not hasattr(chunk, 'expert_parallel_buffers'):
        return []
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def forget_gathered(chunk: Any) -> None:
    """Make a chunk with sharded parameters gather them anew; wait for what is under way."""
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None
        group.param_gather_dispatched = False
