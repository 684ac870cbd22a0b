"""An optimizer step without a barrier: tried on what a rank knows, validated when all is known.

One step goes like this on each rank. The reductions over all ranks are begun, not waited for. The
state of the ranks before it arrives; if it and the rank's own allow a step, the model gets stepped
parameters on trial and the rank goes ahead with forwards of the next iteration. Then, before
anything touches the gradients, the reductions' results are there: the true step is taken, or what
the trial has taken of it stands, with the synchronous step's bits. If the trial was right, the
forwards are kept; if not, they are dropped, and their data given again. The caller gets the true
step's result.

(Zero Bubble Pipeline Parallelism, section 4, which sends the full state back through the ranks;
here all get it from the reduction itself, which also gives Megatron's own roundings.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_zbpp.post_validation.partial_state import Chain
from megatron_zbpp.post_validation.policy import Governor

STEP = 'optimizer step'  # as it is called where ranks meet


@dataclass(frozen=True)
class Outcome:
    """Of a true step.

    Attributes:
        result: what the optimizer's step returns.
        clean: whether the parameters are what a trial step would have made: neither skipped nor
            clipped.
    """

    result: Any
    clean: bool


class Update(Protocol):
    """One step of one optimizer."""

    clip_grad: float

    def begin(self, possible: bool) -> float:
        """Starts all reductions; the squared norm of this stage's gradients, infinite if one of its
        ranks found an overflow or says that going ahead is not `possible`."""

    def try_step(self) -> None:
        """The model gets the parameters after a step."""

    def finish(self) -> Outcome:
        """Waits for the reductions and takes the true step."""

    def synchronous(self) -> Outcome:
        """The step as it is without all this."""


class Ahead(Protocol):
    """The first forwards of the next iteration."""

    def possible(self) -> bool:
        """Whether this rank can run them: has their data, and nothing forbids it."""

    def run(self, ranks: int) -> None:
        """Runs this rank's part, if so many `ranks` of the chain go ahead; receives what others
        sent in any case."""

    def settle(self, stands: bool) -> None:
        """Keeps the forwards for the iteration to come, or drops them."""


class PostValidation:
    """The steps of one optimizer.

    Args:
        governor: when to step early.
        meeting: a context around what waits for other ranks, given in words.

    Attributes:
        early: how many steps were tried before all ranks had agreed, on this rank.
        taken_back: how many of them did not stand.
        agreed: whether the latest step's result is known to be alike on all ranks.
    """

    def __init__(
        self, governor: Governor, meeting: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self.governor = governor
        self._meeting = meeting
        self.early = 0
        self.taken_back = 0
        self.agreed = False

    def step(self, update: Update, chain: Chain, ahead: Ahead) -> Any:
        """Takes one step; returns what the optimizer's own returns."""
        self.agreed = self.governor.engaged
        if self.governor.engaged:
            outcome = self._step(update, chain, ahead)
        else:
            with self._meeting(STEP):
                outcome = update.synchronous()
        self.governor.after(outcome.clean)
        return outcome.result

    def _step(self, update: Update, chain: Chain, ahead: Ahead) -> Outcome:
        with self._meeting(f'{STEP}: the state of the ranks before'):
            own = update.begin(ahead.possible())
            prefix = chain.extend(own, update.clip_grad)
        tried = prefix.ahead > chain.place and not chain.last  # the last rank soon knows everything
        if tried:
            update.try_step()
        ahead.run(prefix.ahead)
        with self._meeting(f'{STEP}: the state of all ranks'):
            outcome = update.finish()
        ahead.settle(outcome.clean)
        self.early += tried
        self.taken_back += tried and not outcome.clean
        return outcome
