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

The state that goes from rank to rank only decides who steps early; what the step is judged by in
the end is reduced as Megatron reduces it. All ranks see the same results, and so have one policy of
when steps are taken early.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_zbpp.post_validation import STEP


@dataclass
class EarlyStepPolicy:
    """Decides by the outcomes of the latest steps: alike on all ranks, which see the same ones."""

    # so many in a row, neither clipped nor skipped, and steps are taken early
    clean_steps: int = 10
    window: int = 20  # of early steps, that is looked back on
    tolerated: int = 4  # if more of them had to be taken back, steps wait for all ranks again
    # after so many iterations in a row that had to run again, steps always wait
    most_redone: int = 3
    _redone: int = 0
    _in_a_row: int = 0
    _failed: deque[bool] = field(init=False)
    engaged: bool = field(init=False)  # whether the next step is taken early
    ended: bool = False  # whether steps wait from now on, whatever comes

    def __post_init__(self) -> None:
        if self.clean_steps < 0:
            raise ValueError(f'clean_steps is {self.clean_steps}: give 0 or more')
        self._failed = deque(maxlen=self.window)
        self.engaged = self.clean_steps == 0

    def after(self, clean: bool, early: bool = True) -> None:
        """Take note of a step, `early` if a rank went ahead: steps that none tried cost nothing."""
        if self.ended:
            return
        self._in_a_row = self._in_a_row + 1 if clean else 0
        if not self.engaged:
            self.engaged = self._in_a_row >= max(self.clean_steps, 1)
            return
        if early:
            self._failed.append(not clean)
        if sum(self._failed) > self.tolerated:
            self.engaged = False
            self._failed.clear()

    def after_iteration(self, redone: bool) -> None:
        """Take note of an iteration that had begun early, and whether it had to run again."""
        self._redone = self._redone + 1 if redone else 0
        if self._redone >= self.most_redone:
            self.end()

    def end(self) -> None:
        """Let all steps wait from now on."""
        self.engaged, self.ended = False, True


_TAG = 4  # channels of messages, shapes and activations have those below


@dataclass(frozen=True)
class Prefix:
    """The state of the first ranks of the chain."""

    # of their gradients; infinite if one found an overflow or cannot go ahead
    squared_norm: float = 0.0
    ahead: int = 0  # how many of them have gone ahead

    def then(self, squared_norm: float, clip_grad: float) -> Prefix:
        """Return the prefix with one more rank, which goes ahead exactly if the state allows it."""
        total = self.squared_norm + squared_norm
        return Prefix(total, self.ahead + is_clean(math.sqrt(total), clip_grad))


def is_clean(norm: float, clip_grad: float) -> bool:
    """Return True if gradients of this norm are neither skipped nor clipped (0: never)."""
    return math.isfinite(norm) and (clip_grad <= 0 or clip_grad / (norm + 1e-6) >= 1)


class PartialReduction:
    """Passes prefixes from rank to rank."""

    def __init__(
        self, pp_group: dist.ProcessGroup, order: tuple[int, ...], device: torch.device
    ) -> None:
        self.place = order.index(dist.get_rank(pp_group))  # of this rank in the chain
        self.last = self.place == len(order) - 1  # whether it is the last
        ranks = [dist.get_global_rank(pp_group, rank) for rank in order]
        self._before = ranks[self.place - 1] if self.place else None
        self._behind = ranks[self.place + 1] if self.place + 1 < len(ranks) else None
        self._pp_group = pp_group
        self._device = device
        self._leaving: tuple[dist.Work, torch.Tensor] | None = None

    def extend(self, squared_norm: float, clip_grad: float) -> Prefix:
        """Wait for the ranks before, add this one, and tell the ranks behind."""
        prefix = self._receive().then(squared_norm, clip_grad)
        if self._behind is not None:
            if self._leaving is not None:
                self._leaving[0].wait()
            values = [prefix.squared_norm, prefix.ahead]
            tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
            work: Any = dist.isend(tensor, self._behind, group=self._pp_group, tag=_TAG)
            self._leaving = work, tensor  # held until it has left
        return prefix

    def _receive(self) -> Prefix:
        if self._before is None:
            return Prefix()
        tensor = torch.empty(2, dtype=torch.float64, device=self._device)
        dist.recv(tensor, self._before, group=self._pp_group, tag=_TAG)
        squared_norm, ahead = tensor.tolist()
        return Prefix(squared_norm, int(ahead))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a true step."""

    result: Any  # what the optimizer's step returns
    # whether the parameters are what a speculative step would have made: neither skipped nor
    # clipped
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
        """Return True if this rank can run the forwards: has their data, and nothing forbids it."""
        ...

    def run(self, ranks: int) -> None:
        """Run this rank's part, if so many `ranks` of the chain go ahead.

        Receives what others sent in any case.
        """

    def settle(self, clean: bool) -> None:
        """Keep the forwards for the iteration to come, or drop them."""


class PostValidation:
    """The steps of one optimizer."""

    def __init__(
        self,
        policy: EarlyStepPolicy,  # when to step early
        # a context around what waits for other ranks, given in words
        collective: Callable[[str], AbstractContextManager[None]],
        # tells the user when steps begin to be taken early, and when they no longer are
        say: Callable[[str], None],
    ) -> None:
        self.policy, self._collective, self._say = policy, collective, say
        self._told = False  # that steps are taken early
        self.early = 0  # steps that were tried before all ranks had agreed, on this rank
        self.taken_back = 0  # how many of them did not stand
        # iterations that had begun early and ran again: the program changed what they began with
        self.redone = 0
        self.agreed = False  # whether the latest step's result is known to be alike on all ranks

    def step(
        self,
        optimizer_step: OptimizerStep,
        reduction: PartialReduction,
        next_iteration: NextIteration,
    ) -> Any:
        """Take one step; return the result of the optimizer's own step."""
        self._tell()
        self.agreed = self.policy.engaged
        if not self.policy.engaged:
            with self._collective(STEP):
                outcome = optimizer_step.synchronous()
            self.policy.after(outcome.clean)
            return outcome.result
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
        return outcome.result

    def after_iteration(self, redone: bool, prefilled: bool = False) -> None:
        """Take note of an iteration that had begun early."""
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
