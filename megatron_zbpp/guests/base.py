"""The protocol between a run and its guests.

A guest overrides what it needs. A run asks its guests in one order, which all ranks have alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.runtime.clock import Filler
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore

Around = Callable[[Pass], AbstractContextManager]
"""Returns what a pass runs within."""


class Change(NamedTuple):
    """A change of what runs from the next iteration on."""

    costs: Costs | None  # measured, for which it was planned; None: unknown
    # to run; None: the same schedule, with copies to the host planned by `costs`
    schedule: Schedule | None = None


class ModelLayers(NamedTuple):
    """The layers of the model that is trained."""

    # in the language of Megatron's flag, as `Ett|tt|ttL`; None where there is none
    layout: str | None
    alike: bool  # whether decoder layers do the same


class Run(Protocol):
    """A run, as its guests see it."""

    store: WeightGradStore

    @property
    def overlaps(self) -> bool:
        """Overlap of iterations: ranks begin one without waiting for all; alike on all ranks."""
        ...

    def collective(self, what: str) -> AbstractContextManager[None]:
        """Let the watchdog watch a collective call, reported under the name `what`."""
        ...

    def copy_times(self) -> Mapping[int, float]:
        """Wait for copies to the host; return their seconds, one way, by stage of this rank."""
        ...

    def without_copies(self, schedule: Schedule) -> Schedule:
        """Return `schedule`, which runs, without its copies to the host."""
        ...


class Guest:
    """A guest whose methods do nothing unless they are overridden."""

    counting: bool = False  # whether it wants bytes counted
    skips_gradients: bool = False  # whether it leaves weight gradients out in the step that runs
    filler: Filler | None = None  # runs steps of its own while a rank waits; None: it has none

    def refuses(self, schedule: Schedule) -> str | None:
        """Return why a training by `schedule` cannot be watched, and the cure; None: it can."""

    def fingerprint(self) -> Mapping[str, object]:
        """Return the values, by name, that must be equal on all ranks of the pipeline."""
        return {}

    def join(self, run: Run) -> None:
        """Register the guest with a run, before anything is trained."""

    def resume(self, step: int) -> None:
        """Handle a loaded checkpoint of a training that had taken so many steps."""

    def starts(self, describe: Callable[[], ModelLayers]) -> None:
        """Handle the start of the training."""

    def before(self, step: int | None) -> None:
        """Handle the start of a step of training, from 0 on; None: the one after the last."""

    def within(self, named: Around, call: Any, pp_group: Any) -> Around:
        """Return the context of the passes of a call: `named`, with that of the guest around it."""
        return named

    def after(self, iteration: Iteration, run: Run) -> Change | None:
        """Return the change behind an iteration, alike on all ranks; it may call collectives."""

    def changed(self, change: Change) -> None:
        """Handle a change of the running schedule."""
