"""An optimizer step without a barrier: tried on what a rank knows, validated when all is known.

One step goes like this on each rank. The reductions over all ranks are begun, not waited for. The
state of the ranks before it arrives; if it and the rank's own allow a step, the model gets the
parameters of a speculative step, and the rank goes ahead with forwards of the next iteration. Then,
before anything touches the gradients, the reductions' results are there: the true step is taken, or
what the speculative one has taken of it stays, with the synchronous step's bits. If that was right,
the forwards are kept; if not, they are dropped, and their data given again. The caller gets the
true step's result.

(Zero Bubble Pipeline Parallelism, section 4, which sends the full state back through the ranks;
here all get it from the reduction itself, which also gives Megatron's own roundings.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_zbpp.post_validation.partial_state import PartialReduction
from megatron_zbpp.post_validation.policy import EarlyStepPolicy

STEP = 'optimizer step'  # as it is called where ranks meet


@dataclass(frozen=True)
class Outcome:
    """The outcome of a true step.

    Attributes:
        result: what the optimizer's step returns.
        clean: whether the parameters are what a speculative step would have made: neither skipped
            nor clipped.
    """

    result: Any
    clean: bool


class OptimizerStep(Protocol):
    """One step of one optimizer."""

    clip_grad: float

    def begin(self, possible: bool) -> float:
        """Start all reductions; return the squared norm of this stage's gradients.

        It is infinite if one of its ranks found an overflow, or says that going ahead is not
        `possible`.
        """
        ...

    def try_step(self) -> None:
        """Give the model the parameters after a step."""

    def finish(self) -> Outcome:
        """Wait for the reductions and take the true step."""
        ...

    def synchronous(self) -> Outcome:
        """Return the step as it is without all this."""
        ...


class NextIteration(Protocol):
    """The first forwards of the next iteration."""

    def possible(self) -> bool:
        """Return whether this rank can run them: has their data, and nothing forbids it."""
        ...

    def run(self, ranks: int) -> None:
        """Run this rank's part, if so many `ranks` of the chain go ahead.

        Receives what others sent in any case.
        """

    def settle(self, clean: bool) -> None:
        """Keep the forwards for the iteration to come, or drop them."""


class PostValidation:
    """The steps of one optimizer.

    Args:
        policy: when to step early.
        collective: a context around what waits for other ranks, given in words.
        say: tells the user when steps begin to be taken early, and when they no longer are.

    Attributes:
        early: how many steps were tried before all ranks had agreed, on this rank.
        taken_back: how many of them did not stand.
        redone: how many iterations that had begun early ran again, since the program changed what
            they had begun with.
        agreed: whether the latest step's result is known to be alike on all ranks.
    """

    def __init__(
        self,
        policy: EarlyStepPolicy,
        collective: Callable[[str], AbstractContextManager[None]],
        say: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self._collective = collective
        self._say = say
        self._told = False  # that steps are taken early
        self.early = 0
        self.taken_back = 0
        self.redone = 0
        self.agreed = False

    def step(
        self,
        optimizer_step: OptimizerStep,
        reduction: PartialReduction,
        next_iteration: NextIteration,
    ) -> Any:
        """Take one step; return what the optimizer's own returns."""
        self._tell()
        self.agreed = self.policy.engaged
        if self.policy.engaged:
            outcome = self._step(optimizer_step, reduction, next_iteration)
        else:
            with self._collective(STEP):
                outcome = optimizer_step.synchronous()
            self.policy.after(outcome.clean)
        return outcome.result

    def after_iteration(self, redone: bool, prefilled: bool = False) -> None:
        """Take note of an iteration that had begun early.

        Args:
            redone: whether it had to run again.
            prefilled: whether the program had put gradients of its own before it.
        """
        self.redone += redone
        self.policy.after_iteration(redone)
        if prefilled:
            self.policy.end()
        if self.policy.ended:
            self._told = False
            self._say(
                'post-validation ends, optimizer steps wait for all ranks from now on: '
                + (
                    'gradients are not zero when an iteration begins'
                    if prefilled
                    else f'the program changes weights after each of {self.policy.most_redone} '
                    'steps in a row: leave out --enable-optimizer-post-validation, or change them '
                    'before optimizer.step()'
                )
            )

    def _tell(self) -> None:
        engaged = self.policy.engaged
        if engaged == self._told:
            return
        self._told = engaged
        if engaged:
            self._say(
                f'post-validation begins, after {self.policy.clean_steps} clean optimizer steps: '
                'from now on they do not wait for all ranks'
            )
        else:
            self._say(
                f'post-validation pauses: more than {self.policy.tolerated} of the latest '
                f'{self.policy.window} early steps were taken back. It begins again after '
                f'{self.policy.clean_steps} clean ones'
            )

    def _step(
        self,
        optimizer_step: OptimizerStep,
        reduction: PartialReduction,
        next_iteration: NextIteration,
    ) -> Outcome:
        with self._collective(f'{STEP}: the state of the ranks before'):
            own = optimizer_step.begin(next_iteration.possible())
            prefix = reduction.extend(own, optimizer_step.clip_grad)
        goes_ahead = prefix.ahead > reduction.place
        tried = goes_ahead and not reduction.last  # which soon knows everything
        if tried:
            optimizer_step.try_step()
        next_iteration.run(prefix.ahead)
        with self._collective(f'{STEP}: the state of all ranks'):
            outcome = optimizer_step.finish()
        next_iteration.settle(outcome.clean)
        self.early += tried
        self.taken_back += tried and not outcome.clean
        self.policy.after(outcome.clean, early=prefix.ahead > 0)  # the first rank's: known to all
        return outcome
