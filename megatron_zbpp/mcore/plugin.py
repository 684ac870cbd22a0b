"""Composes what `megatron_zbpp.enable` puts into Megatron: a session, and patches that use it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron_zbpp.mcore.iteration import forward_backward
from megatron_zbpp.mcore.patches import (
    linear,
    log_line,
    memory_report,
    placement,
    transformer_engine,
)
from megatron_zbpp.mcore.patches.registry import Patch, Registry
from megatron_zbpp.mcore.post_validation import split_step, stepping
from megatron_zbpp.mcore.post_validation.next_iteration import NextIteration
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.post_validation.protocol import PostValidation
from megatron_zbpp.runtime.observe.measure import Figures, Iteration


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
        self._next = NextIteration(self.session)
        self._steps = stepping.Steps(self.session, self._next)
        self._registry = Registry()

    @property
    def latest(self) -> Iteration | None:
        """The latest iteration of this rank."""
        return self.session.latest

    @property
    def post_validation(self) -> PostValidation | None:
        """What became of early optimizer steps; None: they were not asked for."""
        return self.session.post_validation

    @property
    def num_chunks(self) -> int:
        """Chunks of the model that each pipeline rank builds."""
        return self.session.programs.num_chunks

    def figures(self) -> Figures | None:
        """Return bubble, idle time and memory: see `megatron_zbpp.figures`."""
        return self.session.figures()

    @property
    def enabled(self) -> bool:
        """Whether it is in place."""
        return self._registry.installed

    def patches(self) -> Iterator[Patch]:
        """Yield everything that is replaced."""
        session = self.session
        return itertools.chain(
            forward_backward.patches(session, self._next),
            linear.patches(session.store),
            transformer_engine.patches(session.programs.splits),
            placement.patches(session.programs.placement, session.agree),
            log_line.patches(session),
            memory_report.patches(session),
            split_step.patches(),
            stepping.patches(self._steps, session.post_validation),
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
            self.session.watchdog.stop()
            self._registry.undo()

    def __enter__(self) -> Plugin:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()
