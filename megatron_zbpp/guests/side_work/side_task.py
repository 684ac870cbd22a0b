"""The guest whose steps fill the time in which a rank waits."""

from __future__ import annotations

from megatron_zbpp.guests.base import Guest, Run
from megatron_zbpp.guests.side_work.side_work import SideWork
from megatron_zbpp.runtime.measure import Iteration


class SideTask(Guest):
    """Tells `work` when passes are expected, as measured.

    Args:
        work: of this rank.
    """

    def __init__(self, work: SideWork) -> None:
        self.filler = work
        self._work = work

    def after(self, iteration: Iteration, run: Run) -> None:
        """Measure, while that is due: a collective of the pipeline."""
        with run.collective('times of the pipeline for a side task'):
            self._work.after(iteration, run.overlaps)
