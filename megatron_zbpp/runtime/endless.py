"""A training whose pipeline never drains: what one call of Megatron's leaves to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.tables import Tables
from megatron_zbpp.runtime.versions import OneStorage, Slots, Versions
from megatron_zbpp.techniques.updates.calls import Calls
from megatron_zbpp.techniques.updates.graph import STASHED
from megatron_zbpp.techniques.updates.versions import Updates

Result = TypeVar('Result')


class EndlessTraining:
    """The calls of one training, which go on where the one before has left.

    Attributes:
        versions: of the weights of this rank's stage; made in the first call.
    """

    def __init__(self) -> None:
        self.versions: Versions | None = None
        self._running: Executor | None = None
        self._calls = self._steps = 0
        self._stepping = False
        self._given: tuple[object, ...] = ()

    def begin(
        self,
        parameters: Sequence[torch.Tensor],
        updates: Updates,
        stage: int,
        buffered: bool = False,
    ) -> Versions:
        """Return the versions of the weights, made in the first call.

        Args:
            parameters: of the stage.
            updates: how they are updated.
            stage: of this rank.
            buffered: whether steps write to buffers that parameters are views of.
        """
        if self.versions is None:
            delay = updates.delays[stage] if updates.delays else None
            self.versions = OneStorage(parameters)
            if updates.backward == STASHED:
                self.versions = Slots(parameters, updates.every, delay, buffered)
        return self.versions

    def next_tables(self, calls: Calls, rank: int, given: tuple[object, ...]) -> Tables:
        """Return what this call runs.

        Args:
            calls: of the schedule.
            rank: in the pipeline.
            given: what the program passes in each call: it has to be the same.

        Raises:
            ValueError: it is another, or the call before had no optimizer step.
        """
        if self._steps != self._calls:
            raise ValueError(
                f'{self._steps} optimizer steps in {self._calls} calls: an asynchronous schedule '
                'numbers weights by calls; step once after each call, or take a synchronous '
                'schedule, such as zb-v'
            )
        if self._calls and not _same(given, self._given):
            raise ValueError(
                'the number of microbatches, the data iterator or the model is not that of the '
                'call before, whose forwards have begun this one: pass the same in every call, or '
                'take a synchronous schedule, such as zb-v'
            )
        self._given = given
        self._calls += 1
        return Tables(calls.program(rank, self._calls - 1))

    def enter(self, executor: Executor) -> None:
        """Let `executor` go on with what the call before has left."""
        if self._running is not None:
            executor.inherit(self._running)
        self._running = executor

    def step(self, step: Callable[[], Result]) -> Result:
        """Take the step behind a call; steps within it are its parts.

        Raises:
            ValueError: the call has had its step.
        """
        if self._stepping or self.versions is None:
            return step()
        if self._steps == self._calls:
            raise ValueError(
                f'a second optimizer step behind call {self._calls}: an asynchronous schedule '
                'numbers weights by calls; train one model with one optimizer'
            )
        self._stepping = True
        try:
            return self.versions.step(step)
        finally:
            self._stepping = False
            self._steps += 1


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return len(one) == len(other) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(one, other, strict=True)
    )
