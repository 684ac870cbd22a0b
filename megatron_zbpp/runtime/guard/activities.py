"""Activities of the main thread that must not take forever: collectives, passes, and pauses."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.guard.calls import calls_of, is_distributed, is_library, words
from megatron_zbpp.runtime.guard.position import Tracker


class Activity(Protocol):
    """An activity of the main thread that must not take forever."""

    def ended(self) -> None:
        """Take note that the main thread has done its part."""

    def beat(self) -> Hashable:
        """Return something that changes with each step; None when all is over. Never wait."""
        ...

    def lost(self) -> bool:
        """Return whether another rank has died before its end, as far as this one has heard."""
        ...

    def standing(self) -> dict[str, str]:
        """Return where it stands, for people: `now`, `waits for`, and what else there is."""
        ...

    def waits(self) -> tuple[int, ...]:
        """Return the global ranks that it waits for; those that may be late."""
        ...


class Collective:
    """A collective call of the pipeline's ranks."""

    def __init__(self, what: str) -> None:
        self._what: str | None = what

    def ended(self) -> None:
        self._what = None

    def beat(self) -> Hashable:
        return self._what

    def lost(self) -> bool:
        return False  # the main thread is told

    def standing(self) -> dict[str, str]:
        waits = 'the other ranks of the pipeline to come there'
        return {'now': f'{self._what}', 'waits for': waits}

    def waits(self) -> tuple[int, ...]:
        return _others()


class Passes:
    """One iteration of `executor`, or what reports call `part_of`, to its end on all ranks.

    A rank that is done tells the others by a reduction on `group` that nobody waits for: until it
    ends, a rank that stops in its cool-down would be missed by those that have no more passes.
    """

    def __init__(self, executor: Executor, group: Any, part_of: str | None = None) -> None:
        self._tracker, self._part_of = Tracker(executor), {'part of': part_of} if part_of else {}
        self._group = group
        self._all_done: dist.Work | None = None

    def ended(self) -> None:
        self._all_done = self._group.allreduce([torch.zeros(1, device='cpu')])

    def beat(self) -> Hashable:
        over = self._heard() is not None and not self.lost() and self._tracker.complete
        return None if over else self._tracker.position()

    def _heard(self) -> dist.Work | None:
        work = self._all_done
        return work if work is not None and work.is_completed() else None

    def lost(self) -> bool:
        work = self._heard()
        if work is None:
            return False
        try:
            work.wait()  # completed: it does not wait, but raise
        except RuntimeError:
            return True
        return False

    def standing(self) -> dict[str, str]:
        return self._tracker.standing() | self._part_of

    def waits(self) -> tuple[int, ...]:
        return self._tracker.waits()


class Forwards:
    """The forwards that `executor` runs ahead: its own part ends it."""

    def __init__(self, executor: Executor) -> None:
        self._tracker = Tracker(executor)
        self._over = False

    def ended(self) -> None:
        self._over = True

    def beat(self) -> Hashable:
        return None if self._over else self._tracker.position()

    def lost(self) -> bool:
        return False  # the main thread is told

    def standing(self) -> dict[str, str]:
        return self._tracker.standing()

    def waits(self) -> tuple[int, ...]:
        return self._tracker.waits()


class Pause:
    """A pause between two other activities, of which we know nothing but the calls.

    Args:
        thread: the identity of the main thread.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def ended(self) -> None:
        """Let another activity begin, which is looked at instead."""

    def beat(self) -> Hashable:
        return self

    def lost(self) -> bool:
        return False  # the main thread is told

    def standing(self) -> dict[str, str]:
        calls = calls_of(self._thread)
        caller = next((call for call in calls if not is_library(call)), calls[-1])
        waits = 'no collective call of torch.distributed'
        if is_distributed(calls[0]):
            of_torch = filter(is_distributed, itertools.takewhile(is_library, calls))
            waits = f'the other ranks to come to {[*of_torch][-1].name} of torch.distributed'
        return {'now': f'between passes, in {words(caller)}', 'waits for': waits}

    def waits(self) -> tuple[int, ...]:
        return _others() if is_distributed(calls_of(self._thread)[0]) else ()


def _others() -> tuple[int, ...]:
    """Return all ranks of the job but this one."""
    return tuple(rank for rank in range(dist.get_world_size()) if rank != dist.get_rank())
