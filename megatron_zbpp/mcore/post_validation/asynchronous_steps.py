"""Optimizer steps of an asynchronous schedule: when, clipped by which norm, at which rates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.post_validation import late_step
from megatron_zbpp.mcore.post_validation.annealed_rates import AnnealedRates
from megatron_zbpp.mcore.post_validation.stage_norm import StageNorms
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.post_validation.protocol import STEP
from megatron_zbpp.runtime.endless import EndlessTraining


class AsynchronousSteps:
    """Takes the steps of one optimizer."""

    def __init__(self, session: Session, endless: EndlessTraining) -> None:
        self._session, self._endless = session, endless
        self._late, self._norms = late_step.LateSteps(session), StageNorms(session)
        self._rates = AnnealedRates(session)

    def patches(self) -> Iterator[Patch]:
        """Yield what else is replaced."""
        yield from late_step.patches(self._endless)
        yield from self._rates.patches()

    @property
    def agreed(self) -> bool:
        """True if ranks need not ask each other for the result of the latest step."""
        return self._late.possible or self._norms.possible

    def step(self, optimizer: MegatronOptimizer, original: Callable[[Any], Any]) -> Any:
        """Take the step behind a call, or begin it; `original` is the optimizer's own."""
        with (
            self._session.watchdog.collective(STEP),
            self._norms.clipping(optimizer),
            self._rates.annealed(optimizer),
        ):
            begin = self._late.begin(optimizer, original)
            return self._endless.step(functools.partial(original, optimizer), begin)
