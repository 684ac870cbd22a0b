"""The planner's budget: counted in steps, so that a plan can be made again.

A clock would let a busy machine plan otherwise than an idle one. So `seconds` are turned into a
fixed number of steps, what half of them suffice for on a slow core; only a machine that needs more
than all of them is stopped by the clock, and then `overran` tells that the plan may not repeat.
What is not counted in steps, such as building named schedules, asks `on_time` between its parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_STEPS_PER_SECOND = 300_000  # one step: about a microsecond of one core of 2024
_STEPS_PER_EFFORT = 450_000  # what CP-SAT does in one of its deterministic seconds
_REPORT_EVERY = 0.5  # seconds

OnTime = Callable[[], bool]  # whether there is time for more


class Budget:
    """Steps that may still be taken, of which parts can be lent out."""

    def __init__(
        self,
        seconds: float,
        report: Callable[[float], None] | None = None,
        reserve: float = 0.0,
    ) -> None:
        """Turn seconds into steps.

        Args:
            seconds: at most; about half of it where nothing else runs.
            report: called now and then with the share that is spent, of steps or of time.
            reserve: seconds before the deadline at which the clock ends the search.
        """
        self.steps = self.left = seconds * _STEPS_PER_SECOND  # that there were, and that there are
        self.overran = False  # whether the clock ended it
        self._parent: Budget | None = None
        self._report = report
        self._reported = time.monotonic()
        self._length = seconds - reserve
        self._deadline = self._reported + self._length

    def split_off(self, share: float) -> Budget:
        """Return a share of what is left; spending it spends of this budget too."""
        part = Budget(0.0)
        part.steps = part.left = self.left * share
        part._parent = self
        return part

    @property
    def effort(self) -> float:
        """The effort that is left, in deterministic seconds of CP-SAT."""
        return max(self.left, 0.0) / _STEPS_PER_EFFORT

    @property
    def seconds(self) -> float:
        """Time to the deadline."""
        return self._deadline - time.monotonic() if self._parent is None else self._parent.seconds

    def spend_effort(self, effort: float, overran: bool) -> None:
        """Spend deterministic seconds of CP-SAT, and tells whether the clock ended it."""
        self.overran = self.overran or overran
        if self._parent is not None:
            self._parent.spend_effort(effort, overran)
        self.left -= effort * _STEPS_PER_EFFORT

    @property
    def spent(self) -> float:
        """Share of the steps that is spent, 0 to 1."""
        return 1 - max(self.left, 0.0) / self.steps if self.steps else 1.0

    def charge(self, steps: float) -> bool:
        """Spend `steps`; False if there were none left."""
        if self.left <= 0:
            return False
        self.left -= steps
        return self.on_time() if self._parent is None else self._parent.charge(steps)

    def on_time(self) -> bool:
        """Return whether the clock leaves time, and report; past the deadline no steps are left."""
        if self._parent is not None:
            return self._parent.on_time()
        now = time.monotonic()
        if now > self._deadline:
            self.left, self.overran = 0.0, True
            return False
        if self._report is not None and now > self._reported + _REPORT_EVERY:
            self._reported = now
            self._report(max(self.spent, 1 - (self._deadline - now) / self._length))
        return True

    def turn(self, share: float) -> OnTime:
        """Return a function that tells whether a share of the time left from now is not over.

        What asks it once that is over is cut short by the clock, and `overran` says so.
        """
        end = time.monotonic() + share * self.seconds

        def in_turn() -> bool:
            over = not self.on_time() or time.monotonic() > end
            self.overran = self.overran or over
            return not over

        return in_turn


def always() -> bool:
    """Return True: there is time for all of it."""
    return True
