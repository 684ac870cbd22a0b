"""Patches of Megatron's optimizer step, and of the waits for all ranks around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    FP32Optimizer,
    MegatronOptimizer,
    MixedPrecisionOptimizer,
)

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.post_validation.protocol import STEP

if TYPE_CHECKING:
    from megatron_zbpp.mcore.optimizer.asynchronous_steps import AsynchronousSteps
    from megatron_zbpp.mcore.optimizer.early_steps import EarlySteps

# Whose `step` is the beginning of an optimizer step.
STEPPING = (FP32Optimizer, MixedPrecisionOptimizer, ChainedOptimizer)

# NVIDIA's training loops: where they make ranks agree
_LOOPS = ('megatron.training.utils', 'megatron.bridge.training.utils.train_utils')

# Megatron-Bridge's: makes iterators of a rank's chunks
_VIEWS = 'megatron.bridge.data.iterator_utils', 'make_data_iterator_list'


def patches(steps: Steps) -> Iterator[Patch]:
    """Yield the optimizers' `step`, and the waits around it where steps do not wait for all ranks.

    NVIDIA's training loops make ranks agree on results that they have in common, and take the time
    of an iteration behind a barrier.
    """
    if steps.asynchronous is not None:
        yield from steps.asynchronous.patches()
    for owner in STEPPING:
        yield Patch(f'{owner.__module__}:{owner.__name__}', 'step', steps.stepping)
    if not steps.may_not_wait:
        return
    from megatron_zbpp.mcore.optimizer import split_step

    yield from split_step.patches()
    without_barrier = functools.partial(_without_barrier, steps)
    yield Patch('megatron.core.timers:Timer', 'elapsed', without_barrier)
    for name, same in (
        ('logical_and_across_model_parallel_group', lambda value: value is True),
        ('reduce_max_stat_across_model_parallel_group', _as_float32),
    ):
        without_reduction = functools.partial(_without_reduction, steps, same)
        for module in _LOOPS:
            yield Patch(module, name, without_reduction, everywhere=True, late=True)
    yield Patch(*_VIEWS, _the_same_views, everywhere=True, late=True)


def _as_float32(value: float | None) -> float | None:
    """Return the value as it comes out of Megatron's reduction."""
    return None if value is None else torch.tensor(value, dtype=torch.float32).item()


def _without_reduction(steps: Steps, same: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def reduce(value: Any, *args: Any, **kwargs: Any) -> Any:
        if steps.agreed:
            return same(value)
        return original(value, *args, **kwargs)

    return reduce


def _the_same_views(original: Callable) -> Callable:
    """Give chunks the iterators of the iteration before, in which this one may have begun."""
    from megatron_zbpp.post_validation.data_iterators import SharedIterators

    views = SharedIterators()

    @functools.wraps(original)
    def make_data_iterator_list(model: list, data_iterator: Iterator | None) -> Any:
        if not isinstance(model, list) or len(model) < 2:
            return original(model, data_iterator)
        return views.of(data_iterator, len(model))

    return make_data_iterator_list


def _without_barrier(steps: Steps, original: Callable) -> Callable:
    @functools.wraps(original)
    def elapsed(self: Any, reset: bool = True, barrier: bool = False) -> float:
        return original(self, reset=reset, barrier=barrier and not steps.agreed)

    return elapsed


class Steps:
    """Takes the steps of optimizers, without a wait for all ranks where that was asked for."""

    def __init__(self, session: Session, early: EarlySteps | None) -> None:
        self._session = session
        self._early = early
        # takes those of an asynchronous schedule; None: it is none
        self.asynchronous: AsynchronousSteps | None = None
        if session.endless is not None:
            from megatron_zbpp.mcore.optimizer.asynchronous_steps import AsynchronousSteps

            self.asynchronous = AsynchronousSteps(session, session.endless)

    @property
    def may_not_wait(self) -> bool:
        """True if steps are asked for that do not wait for all ranks."""
        return self._session.post_validation is not None or self.asynchronous is not None

    @property
    def agreed(self) -> bool:
        """True if ranks need not ask each other for the result of the latest step."""
        if self.asynchronous is not None:
            return self.asynchronous.agreed
        post_validation = self._session.post_validation
        return post_validation is not None and post_validation.agreed

    def stepping(self, original: Callable) -> Callable:
        """Return `original`, the `step` of a class of optimizers, behind our decision."""

        @functools.wraps(original)
        def step(optimizer: MegatronOptimizer) -> Any:
            session, post_validation = self._session, self._session.post_validation
            if session.latest is None:
                return original(optimizer)  # no pipeline, or not ours
            if self.asynchronous is not None:
                return self.asynchronous.step(optimizer, original)
            if self._early is not None and post_validation is not None:
                group = session.latest.pp_group
                return self._early.step(optimizer, original, post_validation, group)
            with session.watchdog.collective(STEP):
                return original(optimizer)

        return step
