"""Where Megatron steps its optimizer, and where it waits for all ranks around that."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import timers
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from megatron_zbpp.analysis.run_ahead import chain
from megatron_zbpp.mcore.post_validation import split_step
from megatron_zbpp.post_validation.partial_state import Chain
from megatron_zbpp.post_validation.protocol import STEP, PostValidation

if TYPE_CHECKING:
    from megatron_zbpp.mcore.plugin import Plugin

TRAINING = 'megatron.training.utils'


def attributes(plugin: Plugin) -> Iterator[tuple[Any, str, Any]]:
    """What steps, and what would wait while the time of an iteration is taken."""
    for owner in split_step.STEPPING:
        yield owner, 'step', plugin.steps.stepping(owner.step)
    if plugin.post_validation is None:
        return
    yield timers.Timer, 'elapsed', _without_barrier(timers.Timer.elapsed, plugin.post_validation)


def training_functions(
    module: ModuleType, post_validation: PostValidation
) -> Iterator[tuple[Callable, Callable]]:
    """What NVIDIA's training loop makes ranks agree with on results that they have in common."""
    for name, same in (
        ('logical_and_across_model_parallel_group', lambda value: value is True),
        ('reduce_max_stat_across_model_parallel_group', _as_float32),
    ):
        original = getattr(module, name)
        yield original, _without_reduction(original, post_validation, same)


def _as_float32(value: float | None) -> float | None:
    """As it comes out of Megatron's reduction."""
    return None if value is None else torch.tensor(value, dtype=torch.float32).item()


def _without_reduction(
    original: Callable, post_validation: PostValidation, same: Callable
) -> Callable:
    @functools.wraps(original)
    def reduce(value: Any, *args: Any, **kwargs: Any) -> Any:
        if post_validation.agreed:
            return same(value)
        return original(value, *args, **kwargs)

    return reduce


def _without_barrier(original: Callable, post_validation: PostValidation) -> Callable:
    @functools.wraps(original)
    def elapsed(self: Any, reset: bool = True, barrier: bool = False) -> float:
        return original(self, reset=reset, barrier=barrier and not post_validation.agreed)

    return elapsed


class Steps:
    """Takes the steps of optimizers, with post-validation where that is possible."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._possible = self._differ = False
        self._optimizer: weakref.ref[MegatronOptimizer] | None = None
        self._alone: dist.ProcessGroup | None = None
        self._chains: dict[dist.ProcessGroup, Chain] = {}

    def stepping(self, original: Callable) -> Callable:
        """`original`, the `step` of a class of optimizers, behind our decision."""

        @functools.wraps(original)
        def step(optimizer: MegatronOptimizer) -> Any:
            if self._plugin.latest is None:
                return original(optimizer)  # no pipeline, or not ours
            if not self._may_be_early(optimizer):
                with self._plugin.watchdog.meeting(STEP):
                    return original(optimizer)
            update = split_step.MegatronUpdate(optimizer, original, self._alone)
            return self._plugin.post_validation.step(update, self._chain(), self._plugin.next)

        return step

    def differ(self) -> None:
        """An iteration is not like the one before, after which its forwards could have begun."""
        if self._plugin.post_validation is not None and not self._differ:
            self._differ = True
            _say(
                'the data iterator, the model or forward_step_func is not the one of the iteration '
                'before: pass the same in every iteration'
            )

    def _may_be_early(self, optimizer: MegatronOptimizer) -> bool:
        if self._plugin.post_validation is None or self._plugin.next.latest is None:
            return False
        known = self._optimizer and self._optimizer()
        if known is None:
            self._optimizer = weakref.ref(optimizer)
            self._possible = self._agree(optimizer)
        elif known is not optimizer and self._possible:
            self._possible = False
            _say('there are several, and forwards need the steps of all')
        return self._possible

    def _agree(self, optimizer: MegatronOptimizer) -> bool:
        """Whether post-validation is possible on all ranks, which is said once if not."""
        reasons: list[str | None] = [None] * dist.get_world_size()
        with self._plugin.watchdog.meeting('whether optimizer steps can be validated later'):
            config = get_model_config(self._plugin.next.latest.models[0])
            reason = split_step.refusal(optimizer) or split_step.refusal_of_model(config)
            dist.all_gather_object(reasons, reason)
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        refused = sorted(filter(None, set(reasons)))
        if refused:
            _say('; '.join(refused))
        return not refused

    def _chain(self) -> Chain:
        pp_group = self._plugin.latest.pp_group
        if pp_group not in self._chains:
            order = chain(self._plugin.placement(pp_group.size()))
            device = next(self._plugin.next.latest.models[0].parameters()).device
            self._chains[pp_group] = Chain(pp_group, order, device)
        return self._chains[pp_group]


def _say(why: str) -> None:
    if dist.get_rank() == 0:
        message = f'megatron_zbpp: optimizer steps wait for all ranks: {why}'
        print(message, file=sys.stderr, flush=True)
