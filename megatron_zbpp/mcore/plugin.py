"""Composes what `megatron_zbpp.enable` puts into Megatron: a session, and patches that use it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from math import isfinite
from typing import TYPE_CHECKING

from megatron_zbpp.mcore import replicas
from megatron_zbpp.mcore.iteration import forward_backward
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.iteration.batch import Batch, NextIteration
from megatron_zbpp.mcore.layers import linear, tied, transformer_engine
from megatron_zbpp.mcore.optimizer import stepping
from megatron_zbpp.mcore.patches import placement, training_loop
from megatron_zbpp.mcore.patches.registry import Patch, Registry
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.mcore.side_effects import isolated
from megatron_zbpp.mcore.start import part_patches
from megatron_zbpp.post_validation.protocol import PostValidation
from megatron_zbpp.runtime.measure import Figures, Iteration

if TYPE_CHECKING:
    from megatron_zbpp.guests.side_work import SideWork


class _NothingAhead(NextIteration):
    """The next iteration of a training whose forwards all wait for their call."""

    def possible(self) -> bool:
        return False

    def replayed(self, iterator: Iterator | None) -> Iterator | None:
        return iterator

    def take(self, arguments: Arguments) -> Batch | None:
        return None

    def stands(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Plugin:
    """Megatron with a schedule of ours; a context manager that disables it at its end.

    Args:
        settings: what was asked for.

    Attributes:
        settings: those.
        session: what the run knows.

    Raises:
        ValueError: settings that make no sense.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.session = Session(settings)
        flights = (face.next_iteration() for face in self.session.faces)
        self._flight = next((each for each in flights if each is not None), None)
        self._next = self._flight or _NothingAhead()
        early = None
        if self._flight is None and self.session.post_validation is not None:
            from megatron_zbpp.mcore.optimizer.early_steps import EarlySteps
            from megatron_zbpp.mcore.optimizer.next_iteration import ForwardsAhead

            self._next = ahead = ForwardsAhead(self.session)
            early = EarlySteps(self.session, ahead)
        self._steps = stepping.Steps(self.session, early)
        self._registry = Registry()

    @property
    def latest(self) -> Iteration | None:
        """The latest iteration of this rank."""
        return self.session.latest

    @property
    def post_validation(self) -> PostValidation | None:
        """Counts of early optimizer steps; None: they were not asked for."""
        return self.session.post_validation

    @property
    def num_chunks(self) -> int:
        """Chunks of the model that each pipeline rank builds."""
        return self.session.programs.num_chunks

    def figures(self) -> Figures | None:
        """Return bubble, idle time and memory: see `megatron_zbpp.figures`."""
        return self.session.figures()

    def side_task(
        self,
        step: Callable[[], object] | None,
        step_seconds: float,
        margin: float | None = None,
        memory: int | None = None,
    ) -> SideWork:
        """Run steps of something else while this rank waits for others; before training starts.

        Some iterations are measured without it, and again where the schedule or the number of
        microbatches changes. Then steps run where one fits, with a margin, before the input of the
        next pass is expected, and before the last rank is expected to end (not where the optimizer
        step does not wait for it: see post-validation); so they cost about nothing as long as they
        take no longer than was said. After two in a row that did, there are no more in that
        iteration. A step runs in this thread between two passes, random states of Python, numpy,
        torch and Megatron and its logged losses saved around it; it may train weights of its own.
        It must not call collectives of the training's process groups. One that raises, or takes
        more memory than it may, is reported, and not called again.

        Args:
            step: called without arguments; returns False when there is no more to do. All ranks of
                the pipeline call this, those that have nothing to do with None.
            step_seconds: that a step takes at most.
            margin: seconds that must be left beside it; default: a fifth of a step, and 1 ms.
            memory: bytes of the device that steps may take, beside what training needs; default:
                nine tenths of what was never needed before the first one, which `auto` reports.
                A host's memory is not counted.

        Returns:
            What counts the steps; its `stop()` ends them.

        Raises:
            ValueError: a time that makes no sense, or no number of bytes.
        """
        for name, value in (('step_seconds', step_seconds), ('margin', margin or 0.0)):
            if not isinstance(value, int | float) or not isfinite(value) or value < 0:
                raise ValueError(f'{name} is {value!r}: give seconds, from 0 up')
        if not step_seconds:
            raise ValueError('step_seconds is 0: give the seconds that a step takes')
        if memory is not None and (not isinstance(memory, int) or memory < 0):
            raise ValueError(f'memory is {memory!r}: give bytes, from 0 up')
        if self.session.endless is not None:
            raise ValueError(
                f'a side task does not go with {self.session.programs.name}, which is '
                'asynchronous: take a synchronous schedule, such as zb-v'
            )
        from megatron_zbpp.guests.side_work import SideTask, SideWork

        work = SideWork(step and functools.partial(isolated, step), step_seconds, margin, memory)
        self.session.invite(SideTask(work))
        return work

    def drop_forwards(self) -> None:
        """Drop the forwards of later batches that an asynchronous schedule has run.

        They run again in the next call, on what they have read and with the weights that they had.
        All ranks call this between a step and a call that is given another data iterator, or
        before an evaluation that reads that of training. Nothing is dropped of a synchronous
        schedule.
        """
        if self._flight is not None:
            self._flight.drop()

    def resume(self, step: int) -> None:
        """Say how many steps a training has taken that goes on from a checkpoint.

        Freezing then goes on in the phase of that step, with its draws. NVIDIA's loop says so by
        itself; in a loop of one's own all ranks call this, before the first iteration.

        Raises:
            ValueError: it is no number of steps.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(
                f'step is {step!r}: give how many were taken, a whole number from 0 up'
            )
        for guest in self.session.guests:
            guest.resume(step)

    def finish_step(self) -> None:
        """Take the optimizer step that is begun, if one is; parameters then have its weights.

        Only `pipedream-2bw` leaves one until the next call needs it. Evaluation and checkpoints of
        Megatron's do this by themselves; a loop of one's own calls it on all ranks before it reads
        weights.
        """
        if self.session.endless is not None:
            self.session.endless.finish_step()

    @property
    def enabled(self) -> bool:
        """True while it is in place."""
        return self._registry.installed

    def patches(self) -> Iterator[Patch]:
        """Yield everything that is replaced."""
        session = self.session
        return itertools.chain(
            forward_backward.patches(session, self._next),
            linear.patches(session.store),
            transformer_engine.patches(session.programs.splits),
            placement.patches(
                session.programs.placement,
                session.agree,
                functools.partial(replicas.data_parallel_rank, session),
                functools.partial(replicas.require_pairs, session.programs),
            ),
            tied.patches(session.programs.placement),
            part_patches.patches(session),
            *(face.patches() for face in session.faces),
            training_loop.patches(session),
            stepping.patches(self._steps),
        )

    def install(self) -> None:
        """Put everything in place and assert that Megatron now finds it.

        Raises:
            RuntimeError: Megatron's code has moved.
        """
        self._registry.install(self.patches())

    def disable(self) -> None:
        """Take everything out again; later calls do nothing."""
        if self.enabled:
            self._next.close()
            self.session.programs.cache.drop()
            self.session.watchdog.stop()
            self._registry.undo()

    def __enter__(self) -> Plugin:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()
