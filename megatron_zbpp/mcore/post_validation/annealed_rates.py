"""Learning rates that begin divided by the delay of their stage (PipeMare's T1)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session

_WARM_UPS = 5  # for how many times the warm-up rates are annealed
_OF_DECAY = 4  # without a warm-up, for this part of the decay


class AnnealedRates:
    """Divides learning rates by max(tau, 1)^(1 - k/K) while step k is taken; tau is the delay.

    Megatron's scheduler and the log go on with the rate of the program.

    Args:
        session: of the calls.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scheduler: weakref.ref[OptimizerParamScheduler] | None = None

    def patches(self) -> Iterator[Patch]:
        """Yield what shows Megatron's scheduler of the learning rate, where it is needed."""
        if self._session.programs.corrects_weights:
            path = f'{OptimizerParamScheduler.__module__}:{OptimizerParamScheduler.__name__}'
            yield Patch(path, 'step', self._seeing)

    def _seeing(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def step(scheduler: OptimizerParamScheduler, *args: Any, **given: Any) -> None:
            self._scheduler = weakref.ref(scheduler)
            original(scheduler, *args, **given)

        return step

    @contextmanager
    def annealed(self, optimizer: MegatronOptimizer) -> Iterator[None]:
        """Let groups of parameters have the rates of this stage while a step lasts."""
        endless = self._session.endless
        if endless is None or not self._session.programs.corrects_weights or endless.stepping:
            yield
            return
        divisor = max(endless.tau, 1) ** self._exponent(endless.steps)
        groups = optimizer.param_groups
        rates = [group['lr'] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group['lr'] = rate / divisor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group['lr'] = rate

    def _exponent(self, steps: int) -> float:
        """Return 1 at the first step, less at each, and 0 from the last one of annealing on."""
        most = self._session.settings.anneal_steps
        if most is not None:
            return 1 - min(steps / most, 1) if most else 0
        scheduler = self._scheduler and self._scheduler()
        if scheduler is None:
            raise ValueError(
                "anneal_steps is None, but no scheduler of Megatron's says over how many steps the "
                'learning rate is warmed up: give the steps over which pipemare anneals it, or 0'
            )
        # in its unit, which may be samples
        most = _WARM_UPS * scheduler.lr_warmup_steps or scheduler.lr_decay_steps // _OF_DECAY
        return 1 - min(scheduler.num_steps / most, 1) if most else 0
