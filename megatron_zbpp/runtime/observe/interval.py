"""The mean of a pipeline's iterations since the last line of the log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from megatron_zbpp.runtime.observe.measure import Extent, Figures, Iteration

_MOST = 1000  # iterations that are kept, where nobody asks


@dataclass
class Interval:
    """Takes note of each iteration of one rank; no rank waits for another before it is asked.

    Attributes:
        latest: the latest iteration; None: there was none.
        iterations: how many all means so far are of.
        idle: the sum of their shares of idle time.
    """

    latest: Iteration | None = None
    iterations: int = 0
    idle: float = 0.0
    _extents: deque[Extent] = field(default_factory=lambda: deque(maxlen=_MOST))
    _due: bool = False
    _early: tuple[int, int] = (0, 0)

    def add(self, iteration: Iteration) -> None:
        """Take note of an iteration that has ended on the host, if not yet on the device."""
        self._settle()
        self.latest, self._due = iteration, True

    def figures(self, early: tuple[int, int] | None = None) -> Figures | None:
        """Return the mean since this was last asked; None: no iteration has ended since.

        A collective of the pipeline, which all its ranks must ask for after the same iteration.

        Args:
            early: how many optimizer steps this rank took early so far, and how many of them were
                taken back; None: none can be.
        """
        if self.latest is None or not self._due:
            return None
        self._settle()
        counts = early or (0, 0)
        new = counts[0] - self._early[0], counts[1] - self._early[1]
        extents, steps = self.latest.from_all((tuple(self._extents), new))
        self._extents.clear()
        self._early = counts
        found = Figures.of(extents)
        self.iterations += found.iterations
        self.idle += found.idle * found.iterations
        if early is None:
            return found
        taken, back = map(max, zip(*steps, strict=True))
        return replace(found, early_steps=taken, taken_back=back)

    def _settle(self) -> None:
        """Measure the latest iteration, unless that is done."""
        if self.latest is not None and self._due:
            self._extents.append(self.latest.extent())
            self._due = False
