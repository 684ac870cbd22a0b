"""Patches of NVIDIA's training loop and of Megatron-Bridge's: log lines, reports and checkpoints.

The modules with the replacements are imported when a loop imports what is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.guard import agreement

_LOOP = 'megatron.training.training'
_MEMORY = 'megatron.training.theoretical_memory_usage'
_CHECKPOINTS = 'megatron.training.checkpointing'
_BRIDGE = 'megatron.bridge.training.checkpointing'
_OPTIMIZER = 'megatron.core.optimizer.distrib_optimizer:DistributedOptimizer'
_BY_RANK = 'optimizer.distributed.dp_group_idx_'  # how keys of what is kept by rank begin


def patches(session: Session) -> Iterator[Patch]:
    """Yield the functions that print lines, save checkpoints and load them."""

    def by(module: str, name: str) -> Callable[[Any], Any]:
        """Return the wrapper `name` of a module of ours."""

        def wrapped(original: Any) -> Any:
            wrapper = getattr(import_module(f'megatron_zbpp.mcore.{module}'), name)
            return wrapper(session, original)

        return wrapped

    for owner, name, wrapper in (
        (_LOOP, 'print_rank_last', 'with_metrics'),
        (_LOOP, 'print_datetime', 'with_summary'),
        (_MEMORY, 'report_theoretical_memory', 'with_schedule'),
    ):
        yield Patch(owner, name, by('training_log', wrapper), everywhere=True, late=True)
    for owner, name, wrapper, user in (
        (_CHECKPOINTS, 'generate_state_dict', 'with_layout', 'save_checkpoint'),
        (_CHECKPOINTS, '_get_checkpoint_format', 'looking_inside', '_load_base_checkpoint'),
        (_CHECKPOINTS, '_load_base_checkpoint', 'comparing', 'load_checkpoint'),
    ):
        ours = by('checkpoints.training_checkpoints', wrapper)
        yield Patch(owner, name, ours, (f'{owner}:{user}',), late=True)
    for name, wrapper, user in (
        ('generate_state_dict', 'with_layout', 'save_checkpoint'),
        ('_load_base_checkpoint', 'comparing', '_load_checkpoint_from_path'),
    ):
        ours = by('checkpoints.bridge_checkpoints', wrapper)
        yield Patch(_BRIDGE, name, ours, (f'{_BRIDGE}:{user}',), late=True)
    yield Patch(_OPTIMIZER, 'sharded_state_dict', functools.partial(_with_placement, session))


def _with_placement(session: Session, original: Callable) -> Callable:
    @functools.wraps(original)
    def sharded_state_dict(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        placement = placement_of(session)
        if placement is None or placement.is_loop:
            return state
        placed = f'{_BY_RANK}placed_{agreement.digest(str(placement.routes))}_'
        for each in nested_values(state):
            if isinstance(each, ShardedBase) and each.key.startswith(_BY_RANK):
                each.key = placed + each.key.removeprefix(_BY_RANK)
        return state

    return sharded_state_dict


def placement_of(session: Session) -> Placement | None:
    """Return the placement of the stages; None: there is no pipeline, or not yet."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    return session.programs.placement(ranks) if ranks > 1 else None
