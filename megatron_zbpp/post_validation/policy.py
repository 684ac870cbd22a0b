"""The policy of early optimizer steps: when they are taken before all ranks have agreed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class EarlyStepPolicy:
    """Decides by what became of the latest steps: alike on all ranks, which see the same results.

    Args:
        clean_steps: so many in a row, neither clipped nor skipped, and steps are taken early.
        window: of early steps, that is looked back on.
        tolerated: if more of them had to be taken back, steps wait for all ranks again.
        most_redone: after so many iterations in a row that had to run again, they always do.

    Attributes:
        engaged: whether the next step is taken early.
        ended: whether steps wait from now on, whatever comes.
    """

    clean_steps: int = 10
    window: int = 20
    tolerated: int = 4
    most_redone: int = 3
    _redone: int = 0
    _in_a_row: int = 0
    _failed: deque[bool] = field(init=False)
    engaged: bool = field(init=False)
    ended: bool = False

    def __post_init__(self) -> None:
        if self.clean_steps < 0:
            raise ValueError(f'clean_steps is {self.clean_steps}: give 0 or more')
        self._failed = deque(maxlen=self.window)
        self.engaged = self.clean_steps == 0

    def after(self, clean: bool, early: bool = True) -> None:
        """Take note of a step, `early` if a rank went ahead: steps that none tried cost nothing."""
        if self.ended:
            return
        self._in_a_row = self._in_a_row + 1 if clean else 0
        if not self.engaged:
            self.engaged = self._in_a_row >= max(self.clean_steps, 1)
            return
        if early:
            self._failed.append(not clean)
        if sum(self._failed) > self.tolerated:
            self.engaged = False
            self._failed.clear()

    def after_iteration(self, redone: bool) -> None:
        """Take note of an iteration that had begun early, and whether it had to run again."""
        self._redone = self._redone + 1 if redone else 0
        if self._redone >= self.most_redone:
            self.end()

    def end(self) -> None:
        """Let all steps wait from now on."""
        self.engaged, self.ended = False, True
