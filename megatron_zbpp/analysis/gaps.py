"""The gaps of a schedule: when each rank waits, and between which passes."""

from __future__ import annotations

from typing import NamedTuple

from megatron_zbpp.ir import Pass
from megatron_zbpp.ir.timeline import Timeline


class Gap(NamedTuple):
    """A time in which a rank runs no pass.

    Attributes:
        rank: that waits.
        start: of the gap, from the start of the batch.
        length: in the unit of the costs.
        before: the pass that ends at its start; None: the batch begins.
        after: the pass that starts at its end; None: the batch ends.
    """

    rank: int
    start: float
    length: float
    before: Pass | None
    after: Pass | None

    @property
    def where(self) -> str:
        """The part of the batch: 'start', 'inside' or 'end'."""
        return 'start' if self.before is None else 'end' if self.after is None else 'inside'


def gaps(timeline: Timeline, least: float = 0.0) -> list[Gap]:
    """Return the gaps of all ranks longer than `least`, each rank's in order of time.

    Args:
        timeline: simulated or measured.
        least: of no interest are gaps that are no longer.
    """
    spans = [span for own in timeline.spans for span in own]
    start, end = min(span[0] for span in spans), max(span[1] for span in spans)
    found: list[Gap] = []
    for rank, (order, own) in enumerate(zip(timeline.schedule.passes, timeline.spans, strict=True)):
        ran = sorted(zip(own, order, strict=True), key=lambda entry: entry[0])
        clock, before = start, None
        for (begin, done), p in ran:
            found.append(Gap(rank, clock - start, begin - clock, before, p))
            if done >= clock:
                clock, before = done, p
        found.append(Gap(rank, clock - start, end - clock, before, None))
    return [gap for gap in found if gap.length > max(least, 1e-9)]
