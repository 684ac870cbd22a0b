"""Patches of NVIDIA's training loop and of Megatron-Bridge's.

They are of log lines, reports and checkpoints, whose replacements are imported when one is called;
and of optimizer steps, with the waits for all ranks around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.patches.registry import Patch, around
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.log import job_log

_LOOP = 'megatron.training.training'
_MEMORY = 'megatron.training.theoretical_memory_usage'
_CHECKPOINTS = 'megatron.training.checkpointing'
_BRIDGE = 'megatron.bridge.training.checkpointing'
_OPTIMIZER = 'megatron.core.optimizer.distrib_optimizer:DistributedOptimizer'
_BY_RANK = 'optimizer.distributed.dp_group_idx_'  # how keys of what is kept by rank begin
# what `print_datetime` prints where training ends
_ENDS = ('after training is done', 'exiting program')
# whose `step` is the beginning of an optimizer step
STEPPING = (
    optimizers.FP32Optimizer,
    optimizers.MixedPrecisionOptimizer,
    optimizers.ChainedOptimizer,
)
# where loops make ranks agree
_AGREE = ('megatron.training.utils', 'megatron.bridge.training.utils.train_utils')
# Megatron-Bridge's: makes iterators of a rank's chunks
_VIEWS = 'megatron.bridge.data.iterator_utils', 'make_data_iterator_list'


def patches(session: Session) -> Iterator[Patch]:
    """Yield the functions that print lines, save checkpoints and load them."""

    def call(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(import_module(f'megatron_zbpp.mcore.{module}'), name)
        return function(session, *args, **kwargs)

    def with_summary(original: Callable, string: str, *args: Any, **kwargs: Any) -> None:
        original(string, *args, **kwargs)  # waits for all ranks
        if str(string).startswith(_ENDS):
            from megatron_zbpp.mcore.training_log import summarise

            if (summary := summarise(session)) is not None:
                job_log.info(str(summary))

    for owner, name, ours in (
        (_LOOP, 'print_rank_last', around(call, 'training_log', 'with_metrics')),
        (_LOOP, 'print_datetime', around(with_summary)),
        (_MEMORY, 'report_theoretical_memory', around(call, 'training_log', 'with_schedule')),
    ):
        yield Patch(owner, name, ours, everywhere=True, late=True)
    for owner, name, function, user in (
        (_CHECKPOINTS, 'generate_state_dict', 'with_layout', 'save_checkpoint'),
        (_CHECKPOINTS, '_get_checkpoint_format', 'looking_inside', '_load_base_checkpoint'),
        (_CHECKPOINTS, '_load_base_checkpoint', 'comparing', 'load_checkpoint'),
        (_BRIDGE, 'generate_state_dict', 'with_bridge_layout', 'save_checkpoint'),
        (_BRIDGE, '_load_base_checkpoint', 'comparing_in_bridge', '_load_checkpoint_from_path'),
    ):
        ours = around(call, 'checkpoints', function)
        yield Patch(owner, name, ours, (f'{owner}:{user}',), late=True)
    yield Patch(_OPTIMIZER, 'sharded_state_dict', around(_with_placement, session))


def _with_placement(
    session: Session, original: Callable, self: DistributedOptimizer, *args: Any, **kwargs: Any
) -> Any:
    state = original(self, *args, **kwargs)
    placement = placement_of(session)
    if placement is None or placement.is_loop:
        return state
    placed = f'{_BY_RANK}placed_{agreement.digest(str(placement.routes))}_'
    for each in nested_values(state):
        if isinstance(each, ShardedBase) and each.key.startswith(_BY_RANK):
            each.key = placed + each.key.removeprefix(_BY_RANK)
    return state


def placement_of(session: Session) -> Placement | None:
    """Return the placement of the stages; None: the job has no pipeline, or none so far."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    return session.programs.placement(ranks) if ranks > 1 else None


def step_patches(session: Session, taker: Any) -> Iterator[Patch]:
    """Yield the optimizers' `step`, and NVIDIA's waits for all ranks where steps do not wait.

    `taker` takes the steps, as `EarlySteps` does; None: Megatron does.
    """
    for owner in STEPPING:
        yield Patch(f'{owner.__module__}:{owner.__name__}', 'step', around(_step, session, taker))
    if taker is None:
        return
    from megatron_zbpp.post_validation.data_iterators import SharedIterators

    elapsed = around(
        lambda original, self, reset=True, barrier=False: original(
            self, reset=reset, barrier=barrier and not taker.agreed
        )
    )
    yield Patch('megatron.core.timers:Timer', 'elapsed', elapsed)

    for name, same in (
        ('logical_and_across_model_parallel_group', lambda value: value is True),
        ('reduce_max_stat_across_model_parallel_group', _as_float32),
    ):
        ours = around(
            lambda same, original, value, *args, **group: (
                same(value) if taker.agreed else original(value, *args, **group)
            ),
            same,
        )
        for loop in _AGREE:
            yield Patch(loop, name, ours, everywhere=True, late=True)
    views = SharedIterators()

    def of_chunks(original: Callable, model: Any, data_iterator: Iterator | None) -> Any:
        # the iterators of the iteration before, in which this one may have begun
        several = isinstance(model, list) and len(model) > 1
        return views.of(data_iterator, len(model)) if several else original(model, data_iterator)

    yield Patch(*_VIEWS, around(of_chunks), everywhere=True, late=True)


def _as_float32(value: float | None) -> float | None:
    """Return the value as it comes out of Megatron's reduction."""
    return None if value is None else torch.tensor(value, dtype=torch.float32).item()


def _step(
    session: Session, taker: Any, original: Callable, optimizer: optimizers.MegatronOptimizer
) -> Any:
    """Take a step of an optimizer, or let `original` do so, the `step` of its class."""
    if session.latest is None:
        return original(optimizer)  # no pipeline, or not ours
    if taker is not None:
        return taker.step(optimizer, original)
    from megatron_zbpp.post_validation import STEP

    with session.watchdog.collective(STEP):
        return original(optimizer)
