"""Composes what `megatron_zbpp.enable` puts into Megatron: a session, and patches that use it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_zbpp.mcore.iteration import preparation
from megatron_zbpp.mcore.iteration.batch import NextIteration
from megatron_zbpp.mcore.layers import linear, transformer_engine
from megatron_zbpp.mcore.patches import placement, training_loop
from megatron_zbpp.mcore.patches.registry import Patch, Registry
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.mcore.side_effects import isolated
from megatron_zbpp.runtime.measure import Figures, Iteration

if TYPE_CHECKING:
    from megatron_zbpp.guests.side_work import SideWork
    from megatron_zbpp.post_validation.protocol import PostValidation


class Plugin:
    """Megatron with a schedule of ours; a context manager that disables it at its end.

    Args:
        settings: of the schedule.
        programs: of the settings; None: they are made now.

    Attributes:
        settings: of the schedule.
        session: what the run knows.

    Raises:
        ValueError: settings that make no sense.
    """

    def __init__(self, settings: Settings, programs: Programs | None = None) -> None:
        self.settings = settings
        self.session = Session(settings, programs)
        faces = self.session.faces
        self._next = next(filter(None, (face.next_iteration for face in faces)), NextIteration())
        # of optimizer steps; None: Megatron takes them
        self._taker = next(filter(None, (face.optimizer_steps for face in faces)), None)
        if self.session.post_validation is not None:
            from megatron_zbpp.mcore.optimizer.early_steps import EarlySteps, ForwardsAhead

            self._next = ahead = ForwardsAhead(self.session)
            self._taker = EarlySteps(self.session, ahead)
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
        microbatches changes. Then a step runs in this thread, between two passes, where one fits
        with a margin before the input of the next pass, or the end of the last rank, is expected.
        Random states of Python, numpy, torch and Megatron and its logged losses are saved around
        it; it may train weights of its own. It must not call collectives of the training's process
        groups. One that raises, or takes more memory than it may, is reported, and not called
        again; after two in a row that took longer than was said, none runs in that iteration.

        Args:
            step: called without arguments; returns False when there is no more to do. All ranks of
                the pipeline call this, those that have nothing to do with None.
            step_seconds: that a step takes at most.
            margin: seconds that must be left beside it; default: a fifth of a step, and 1 ms.
            memory: bytes of the device, not of a host, that steps may take beside the training;
                default: nine tenths of what was never needed before the first one, which `auto`
                reports.

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
        if why := next(filter(None, (face.no_side_task for face in self.session.faces)), None):
            name = self.session.programs.source.name
            raise ValueError(f'a side task does not go with {name}, {why}')
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
        self._next.drop()

    def resume(self, step: int) -> None:
        """Say how many steps a training has taken that goes on from a checkpoint.

        Freezing then goes on in the phase of that step, with its draws. NVIDIA's loop says so by
        itself; in a loop of one's own all ranks call this, before the first iteration.

        Raises:
            ValueError: it is no number of steps.
        """
        if type(step) is not int or step < 0:
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
        for face in self.session.faces:
            face.finish_step()

    def data_parallel_rank(self, chunk: int) -> int:
        """Return the data-parallel rank whose data a chunk of this rank reads."""
        ranks = (face.data_parallel_rank(chunk) for face in self.session.faces)
        found = next((rank for rank in ranks if rank is not None), None)
        group: Any = parallel_state.get_data_parallel_group()
        return dist.get_rank(group) if found is None else found

    @property
    def enabled(self) -> bool:
        return self._registry.installed

    def patches(self) -> Iterator[Patch]:
        session = self.session
        yield from preparation.patches(session, self._next)
        yield from linear.patches(session.store)
        yield from transformer_engine.patches(lambda ranks: session.programs.traits(ranks).splits)
        yield from placement.patches(session, self.data_parallel_rank)
        if not session.programs.is_loop:
            from megatron_zbpp.mcore import placement_independent_init
            from megatron_zbpp.mcore.layers import tied

            yield from tied.patches(session.programs.placement)
            if session.settings.same_start is not False:
                yield from placement_independent_init.patches(session)
        for face in session.faces:
            yield from face.patches()
        yield from training_loop.patches(session)
        yield from training_loop.step_patches(session, self._taker)
        if self._taker is not None:
            from megatron_zbpp.mcore.optimizer import split_step

            yield from split_step.patches()

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
