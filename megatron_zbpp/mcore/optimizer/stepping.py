"""Patches of Megatron's optimizer step, and of the waits for all ranks around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import optimizer as module

from megatron_zbpp.mcore.patches.registry import Patch, around
from megatron_zbpp.mcore.session import Session

# whose `step` is the beginning of an optimizer step
STEPPING = (module.FP32Optimizer, module.MixedPrecisionOptimizer, module.ChainedOptimizer)
# NVIDIA's training loops: where they make ranks agree
_LOOPS = ('megatron.training.utils', 'megatron.bridge.training.utils.train_utils')
# Megatron-Bridge's: makes iterators of a rank's chunks
_VIEWS = 'megatron.bridge.data.iterator_utils', 'make_data_iterator_list'


def patches(steps: Steps) -> Iterator[Patch]:
    """Yield the optimizers' `step`, and NVIDIA's waits for all ranks where steps do not wait."""
    if steps.by_technique is not None:
        yield from steps.by_technique.patches()
    for owner in STEPPING:
        yield Patch(f'{owner.__module__}:{owner.__name__}', 'step', around(steps.step))
    if not steps.may_be_early and steps.by_technique is None:
        return
    from megatron_zbpp.mcore.optimizer import split_step
    from megatron_zbpp.post_validation.data_iterators import SharedIterators

    yield from split_step.patches()

    elapsed = around(
        lambda original, self, reset=True, barrier=False: original(
            self, reset=reset, barrier=barrier and not steps.agreed
        )
    )
    yield Patch('megatron.core.timers:Timer', 'elapsed', elapsed)

    for name, same in (
        ('logical_and_across_model_parallel_group', lambda value: value is True),
        ('reduce_max_stat_across_model_parallel_group', _as_float32),
    ):
        ours = around(
            lambda same, original, value, *args, **group: (
                same(value) if steps.agreed else original(value, *args, **group)
            ),
            same,
        )
        for loop in _LOOPS:
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


class Steps:
    """Takes the steps of optimizers, without a wait for all ranks where that was asked for."""

    def __init__(self, session: Session, early: Any) -> None:  # `EarlySteps`; None: none are
        self._session, self._early = session, early
        self.may_be_early = session.post_validation is not None  # as was asked for
        steps = (face.optimizer_steps() for face in session.faces)
        # takes them as a technique of the schedule has it; None: none has its own
        self.by_technique: Any = next(filter(None, steps), None)

    @property
    def agreed(self) -> bool:
        """True if ranks need not ask each other for the result of the latest step."""
        if self.by_technique is not None:
            return self.by_technique.agreed
        post_validation = self._session.post_validation
        return post_validation is not None and post_validation.agreed

    def step(self, original: Callable, optimizer: module.MegatronOptimizer) -> Any:
        """Take a step of an optimizer, or let `original` do so, the `step` of its class."""
        session, post_validation = self._session, self._session.post_validation
        if session.latest is None:
            return original(optimizer)  # no pipeline, or not ours
        if self.by_technique is not None:
            return self.by_technique.step(optimizer, original)
        if self._early is not None and post_validation is not None:
            group = session.latest.pp_group
            return self._early.step(optimizer, original, post_validation, group)
        from megatron_zbpp.post_validation import STEP

        with session.watchdog.collective(STEP):
            return original(optimizer)
