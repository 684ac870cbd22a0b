"""Guards of a run: the watchdog of a process, the culprit's search, the handshake about settings.

A watchdog without a timeout watches nothing, and imports nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_zbpp.runtime.executor import Executor


class Unwatched:
    """The protocol of a watchdog; this one watches nothing."""

    def collective(self, what: str) -> AbstractContextManager[None]:
        """Watch the main thread in a collective call of the pipeline's ranks."""
        return nullcontext()

    def passes(
        self, executor: Executor, part_of: str | None = None
    ) -> AbstractContextManager[None]:
        """Watch passes, of an iteration or `part_of` else. A collective for a pipeline's first."""
        return nullcontext()

    def forwards(self, executor: Executor) -> AbstractContextManager[None]:
        """Watch the forwards that `executor` runs ahead."""
        return nullcontext()

    def stop(self) -> None:
        """End watching, unless something failed: then the process is still to end in time."""


def watchdog_for(timeout: float, pause_timeout: float | None = None) -> Unwatched:
    """Return the watchdog of this process; arguments as of `Watchdog`, no `timeout` for none."""
    if not timeout:
        return Unwatched()
    from megatron_zbpp.runtime.guard.watchdog import Watchdog

    return Watchdog(timeout, pause_timeout)
