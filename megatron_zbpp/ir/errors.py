"""The error of an invalid schedule, which shows the place in the grid."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.grid import grid

_RANKS = 13  # that the grid shows at most


class ScheduleError(ValueError):
    """A schedule that must not run: what is wrong, where, the cure, and the grid."""

    def __init__(
        self, what: str, schedule: Schedule, cells: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Make the message.

        Args:
            what: what is wrong, where, and the cure: one line.
            schedule: the culprit.
            cells: (rank, index in its order) of the offending cells; an index past the end is
                where a pass is missing.
        """
        super().__init__(f'{what}\n{grid(schedule, cells, height=_RANKS)}')
        self.what = what
