"""The forward_backward function that stands in Megatron's table while the plugin is enabled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import refusals, te
from megatron_zbpp.mcore.settings import settings
from megatron_zbpp.mcore.stages import Call, ModelStage
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.runtime.comm import Message
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration

if TYPE_CHECKING:
    from megatron_zbpp.mcore.plugin import Plugin

# What Megatron's two pipelined functions read from a collection of process groups.
_GROUPS = ('tp', 'cp', 'embd', 'pos_embd', 'pp', 'dp_cp')


def forward_backward(plugin: Plugin, original: Callable, **arguments: Any) -> list[Any]:
    """Runs one global batch by the plugin's schedule; arguments and result are Megatron's.

    Several modules in one pipeline, which have process groups each, go to `original`.
    """
    pg_collection = arguments.get('pg_collection')
    if pg_collection is not None and not isinstance(pg_collection, ProcessGroupCollection):
        _refuse_delayed(arguments.get('model'))
        return original(**arguments)
    return _run(plugin, **arguments)


def _refuse_delayed(model: torch.nn.Module | list[torch.nn.Module] | None) -> None:
    """Raises for modules whose weight gradients only our W passes would compute.

    Raises:
        NotImplementedError: the model was built for one of our schedules.
    """
    for module in model if isinstance(model, list) else [model]:
        if module is not None and te.delaying_modules(module):
            raise NotImplementedError(
                "several modules in one pipeline run by Megatron's own schedule, which would lose "
                'the weight gradients that Transformer Engine delays for ours: call '
                'megatron_zbpp.enable() for models of one module only'
            )


def _run(
    plugin: Plugin,
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | list[Iterator | None] | None,
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable | None = None,
    p2p_communicator: Any = None,  # its ring of neighbours would not do
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> list[Any]:
    """One global batch of one module; returns the loss function's results on the last rank."""
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(list(_GROUPS))
    models = model if isinstance(model, list) else [model]
    config = get_model_config(models[0])
    refuse_unsupported(config, adjust_tensor_shapes_fn)
    call = Call(
        plugin.store,
        forward_step_func,
        num_microbatches,
        groups.cp.size(),
        next(models[0].parameters()).device,
        forward_only,
        collect_non_loss_data,
        first_val_step,
    )
    (shape,) = schedules.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    message = Message(shape, config.pipeline_dtype, call.device)
    plugin.agree(settings(num_microbatches, len(models), message, forward_only, config), groups.pp)
    lowered = plugin.lowered(groups.pp.size(), num_microbatches, forward_only)
    clock = clock_for(call.device)
    executor = Executor(
        lowered.programs[groups.pp.rank()],
        _stages(call, models, data_iterator, lowered.placement, groups.pp.rank()),
        plugin.channels(groups.pp, lowered.placement),
        message,
        plugin.store,
        clock,
    )
    with _timed(config), plugin.watchdog.passes(executor):
        record = executor.run()
    finalize = config.finalize_model_grads_func
    if finalize is not None and not forward_only:
        num_tokens = call.num_tokens if config.calculate_per_token_loss else None
        finalize(models, num_tokens, pg_collection=groups, force_all_reduce=force_all_reduce)
    iteration = Iteration(lowered.schedule, groups.pp, record, clock)
    if forward_only:
        plugin.latest = iteration
    else:
        plugin.trained(iteration)
    return call.results


def refuse_unsupported(config: Any, adjust_tensor_shapes_fn: Callable | None) -> None:
    """Raises for what would be silently wrong, with the cure.

    Raises:
        NotImplementedError: names the setting.
    """
    for refusal in refusals.refused(config):
        raise NotImplementedError(
            f"does not work with --pipeline-schedule: {refusal}, or use Megatron's own schedule"
        )
    if adjust_tensor_shapes_fn is not None:
        raise NotImplementedError(
            "adjust_tensor_shapes_fn does not work with --pipeline-schedule: use Megatron's own"
        )


def _stages(
    call: Call, models: list[torch.nn.Module], data_iterator: Any, placement: Placement, rank: int
) -> dict[int, ModelStage]:
    """The stages of this rank by number.

    Raises:
        ValueError: the model was not built for this placement.
    """
    held = placement.stages(rank)
    if len(models) != len(held):
        raise ValueError(
            f'rank {rank} has {len(models)} model chunks, but the schedule places {len(held)} '
            'there: build the model with the layout of the enabled schedule'
        )
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(held)
    return {
        stage: ModelStage(
            call,
            models[chunk],
            iterators[chunk],
            chunk if len(held) > 1 else None,
            stage == placement.num_stages - 1,
        )
        for chunk, stage in enumerate(held)
    }


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Megatron's own timer around the passes."""
    if config.timers is None:
        yield
        return
    config.timers('forward-backward', log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers('forward-backward').stop()
