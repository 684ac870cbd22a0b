"""The protocol of what runs in the time in which a rank waits."""

from __future__ import annotations

from typing import Protocol

from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.clock import Clock
from megatron_zbpp.runtime.observe.record import Record


class Filler(Protocol):
    """Steps of something else, between passes."""

    def begin(self, clock: Clock, record: Record) -> None:
        """Take note that an iteration begins, whose passes `record` has or will have."""
        ...

    def before(self, p: Pass) -> None:
        """Run steps until `p`, whose input is on its way, is expected to start."""
        ...

    def at_end(self) -> None:
        """Run steps until the last rank is expected to end, when this one has no more to do."""
        ...
