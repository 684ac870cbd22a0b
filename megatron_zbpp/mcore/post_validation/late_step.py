"""Optimizer steps that are begun behind a call and taken within the next one (PipeDream-2BW).

A forward of batch b+2 is the first that needs what the step of batch b makes. So its reductions
have the time of a batch: the norm of all gradients clips as ever, and nobody waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.post_validation import waiting
from megatron_zbpp.mcore.post_validation.split_step import SplitStep
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.post_validation.protocol import STEP
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.log import job_log

# what a scheduler writes into groups of parameters between the two halves
_SCHEDULED = 'lr', 'weight_decay'
_GRADIENTS = 'grad', 'decoupled_grad'
# what of the core reads weights for checkpoints
_READERS = (
    ('megatron.core.transformer.module:MegatronModule', ('sharded_state_dict',)),
    *(
        (f'{each.__module__}:{each.__name__}', ('state_dict', 'sharded_state_dict'))
        for each in (
            FP32Optimizer,
            Float16OptimizerWithFloat16Params,
            DistributedOptimizer,
            ChainedOptimizer,
        )
    ),
)


def patches(endless: EndlessTraining) -> Iterator[Patch]:
    """Yield what reads weights: behind the step that is still to be taken."""

    def behind(original: Callable) -> Callable:
        @functools.wraps(original)
        def read(*args: Any, **given: Any) -> Any:
            endless.finish_step()
            return original(*args, **given)

        return read

    for owner, names in _READERS:
        for name in names:
            yield Patch(owner, name, behind)
    # of --log-params-norm, which waits for all ranks anyway
    yield Patch('megatron.training.utils', 'calc_params_l2_norm', behind, (), True, True)


class LateSteps:
    """Begins the steps of one optimizer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._alone: Any = None  # a group of this rank only
        self._possible: bool | None = None

    @property
    def possible(self) -> bool:
        """True once steps have been found to be taken so."""
        return bool(self._possible)

    def begin(
        self, optimizer: MegatronOptimizer, original: Callable[[Any], Any]
    ) -> Callable[[], Callable[[], Any]] | None:
        """Return what begins a step; None: it has to be taken at once, which is said."""
        endless = self._session.endless
        if endless is None or not endless.late:
            return None
        if self._possible is None:
            self._possible = self._agree(optimizer)
        if not self._possible:
            return None

        def begin() -> Callable[[], Any]:
            step = LateStep(optimizer, original, self._alone)
            return functools.partial(self._take, step)

        return begin

    def _take(self, step: LateStep) -> Any:
        with self._session.watchdog.collective(STEP):
            return step.take()

    def _agree(self, optimizer: MegatronOptimizer) -> bool:
        refused = agreement.reasons(_refusal(optimizer))
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if refused:
            job_log.warning(
                'optimizer steps wait for the norm of all ranks in each call, which costs what '
                'asynchrony gains: %s',
                '; '.join(refused),
            )
        return not refused


def _refusal(optimizer: MegatronOptimizer) -> str | None:
    for each in waiting.members(optimizer):
        if compat.gathers_layers(each):
            return 'ranks gather the layers that they share out behind each step'
        if getattr(each, 'grad_scaler', None) is not None:
            return 'a loss scale has to be known before the next call'
    return waiting.refusal(optimizer)


class LateStep:
    """A step whose reductions are begun; keeps what it needs until it is taken.

    The next call writes to the gradients' buffers, and the scheduler to the groups of parameters.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        original: Callable[[Any], Any],
        alone: dist.ProcessGroup,
    ) -> None:
        self._split = SplitStep(optimizer, original, alone, lambda _: 0)
        self._split.begin_reductions()
        self._groups = optimizer.param_groups
        self._gradients = [
            (p, name, gradient.clone())
            for group in self._groups
            for p in group['params']
            for name in _GRADIENTS
            if (gradient := getattr(p, name, None)) is not None
        ]
        self._scheduled = [_scheduled(group) for group in self._groups]

    def take(self) -> tuple[bool, float | None, int | None]:
        """Wait for the reductions and take the step; return what the optimizer's own returns."""
        with _put_back(self._gradients), self._as_scheduled():
            return self._split.finish().result

    @contextmanager
    def _as_scheduled(self) -> Iterator[None]:
        now = [_scheduled(group) for group in self._groups]
        for group, own in zip(self._groups, self._scheduled, strict=True):
            group.update(own)
        try:
            yield
        finally:
            for group, own in zip(self._groups, now, strict=True):
                group.update(own)


def _scheduled(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _SCHEDULED if name in group}


@contextmanager
def _put_back(gradients: list[tuple[torch.Tensor, str, torch.Tensor]]) -> Iterator[None]:
    """Let parameters have these gradients while this lasts."""
    now = [getattr(p, name, None) for p, name, _ in gradients]
    for p, name, gradient in gradients:
        setattr(p, name, gradient)
    try:
        yield
    finally:
        for (p, name, _), own in zip(gradients, now, strict=True):
            setattr(p, name, own)
