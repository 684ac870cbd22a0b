"""A training whose pipeline never drains: what one call of Megatron's leaves to the next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.tables import Tables
from megatron_zbpp.runtime.versions import Kept, Versions
from megatron_zbpp.techniques.updates.calls import Calls
from megatron_zbpp.techniques.updates.versions import Updates

Result = TypeVar('Result')


class EndlessTraining:
    """The calls of one training, which go on where the one before has left."""

    def __init__(
        self,
        late: bool = False,  # take steps when their weights are needed, where delays leave the time
        warm_up: int = 0,  # calls that run a synchronous schedule first
    ) -> None:
        # of the weights of this rank's stages; made in the first call
        self.versions: Versions | None = None
        self.late = late  # once a call has run: whether steps are taken so
        self.tau = 0.0  # mean delay of this rank's forwards, in steps, where it has one stage
        self.at_end = ExitStack()  # undoes what the training has left at its models
        # a context in which a step writes weights
        self.writing: Callable[[], AbstractContextManager[None]] = nullcontext
        self.loaded: Kept = {}  # what versions had kept, of a checkpoint
        self._unfinished: Callable[[], Any] | None = None
        self._result: Any = None  # of the latest step
        self._running: Executor | None = None
        self._warm_up, self._warm = warm_up, 0  # calls that are to be synchronous, that were
        self._before = 0  # steps of a training that goes on
        self._calls = self._steps = 0
        self._first = 0  # the call that has filled the pipeline
        self._every = 0  # microbatches of a call since
        self.stepping = False  # within a step

    def warms_up(self) -> bool:
        """Return True if the call that begins is synchronous, and count it."""
        warms_up = self._warm < self._warm_up
        self._warm += warms_up
        return warms_up

    def begin(self, updates: Updates, make: Callable[[], Versions]) -> Versions:
        """Return the versions of the weights, made in the first call."""
        if self.versions is None:
            self.late = self.late and steps_late(updates)
            self.versions = make()
            self.loaded = {}
        return self.versions

    def next_tables(self, calls: Calls, rank: int) -> Tables:
        """Return the tables of this call; the pipeline fills anew where forwards were dropped."""
        if self._steps != self._calls:
            raise ValueError(
                f'{self._steps} optimizer steps in {self._calls} calls: an asynchronous schedule '
                'numbers weights by calls; step once after each call, or take a synchronous '
                'schedule, such as zb-v'
            )
        self._every = calls.num_microbatches
        if self._running is None:
            self._first, self.tau = self._calls, calls.ahead(rank) / self._every
            if self.versions is not None:
                self.versions.restart(self._calls, self._every)
        self._calls += 1
        return Tables(calls.program(rank, self._calls - 1 - self._first))

    def enter(self, executor: Executor) -> None:
        """Let `executor` go on with what the call before has left."""
        if self._running is not None:
            executor.inherit(self._running)
        self._running = executor

    def is_ahead(self, p: Pass) -> bool:
        """Return True if the forward is of a batch behind that of the call."""
        return p.microbatch >= (self._calls - self._first) * self._every

    @property
    def begun_with_next_call(self) -> int:
        """Microbatches of all batches up to the next call's, since the pipeline has filled."""
        return (self._calls - self._first + 1) * self._every

    def drop(self) -> None:
        """Forget forwards of later batches: they run again, with the versions that they had."""
        if self._running is not None:
            self._running.drop()
        self._running = None

    def close(self) -> None:
        """Drop those, and leave parameters as their optimizer knows them: this training ends."""
        self.drop()
        if self.versions is not None:
            self.versions.close()
        self.at_end.close()
        self.versions = None
        self._calls = self._steps = 0

    def step(
        self, step: Callable[[], Result], begin: Callable[[], Callable[[], Result]] | None = None
    ) -> Result:
        """Take the step behind a call, or `begin` it; steps within it are its parts.

        Return its result; of one that is only begun that of the step before, but for the first.
        """
        if self.stepping or self.versions is None:
            return step()
        if self._steps == self._calls:
            raise ValueError(
                f'a second optimizer step behind call {self._calls}: an asynchronous schedule '
                'numbers weights by calls; train one model with one optimizer'
            )
        self._steps += 1
        with self.writing():
            if begin is None or not self.late:
                return self._take(step)
            self.finish_step()  # of the call before, where no forward has needed it
            self._unfinished = begin()
            if self._steps == 1:
                self.finish_step()
            return self._result

    @property
    def steps(self) -> int:
        """Steps that the training has taken, synchronous ones too."""
        return self._before + self._warm + self._steps

    def resume(self, steps: int) -> None:
        """Go on with a training that has taken so many steps."""
        self._warm = min(steps, self._warm_up)
        self._before = steps - self._warm

    @property
    def unfinished(self) -> bool:
        """True while a step is begun and not yet taken."""
        return self._unfinished is not None

    def finish_step(self) -> None:
        """Take the step that is begun, if one is; parameters then have the newest weights.

        It waits for the ranks that have not begun it.
        """
        if self._unfinished is not None:
            rest, self._unfinished = self._unfinished, None
            with self.writing():
                self._take(rest)

    def _take(self, step: Callable[[], Result]) -> Result:
        assert self.versions is not None, 'there is one behind a call alone'
        self.stepping = True
        try:
            self._result = self.versions.step(step)
        finally:
            self.stepping = False
        return self._result


def steps_late(updates: Updates) -> bool:
    """Return True if the weights that a step makes are needed within the next call or later."""
    return bool(updates.delays) and min(updates.delays) > 0
