"""A data iterator that can be wound back: for forwards that may have to run once more."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


class ReplayIterator:
    """Gives what `source` gives; items may be drawn early, and given again.

    Attributes:
        source: the iterator.
        given: how many items it has given since `mark`.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.given = 0
        self._drawn: deque[Any] = deque()  # from the source, not given yet
        self._kept: list[Any] | None = None  # given since `mark`, where they are kept

    def __iter__(self) -> ReplayIterator:
        return self

    def __next__(self) -> Any:
        item = self._drawn.popleft() if self._drawn else next(self.source)
        self.given += 1
        if self._kept is not None:
            self._kept.append(item)
        return item

    @property
    def idle(self) -> bool:
        """True if it has nothing that the source would not give."""
        return not self._drawn and not self._kept

    def reserve(self, count: int) -> bool:
        """Draw until `count` items are there to be given; whether the source has as many."""
        while len(self._drawn) < count:
            try:
                self._drawn.append(next(self.source))
            except StopIteration:
                return False
        return True

    def mark(self, keep: bool) -> None:
        """Count from here; `keep`: so that `rewind` can come back."""
        self.given = 0
        self._kept = [] if keep else None

    def forget(self) -> None:
        """Keep nothing for a `rewind`: there will be none."""
        self._kept = None

    def forget_until(self, given: int) -> None:
        """Keep for a `rewind` only what came behind the first `given` items since `mark`."""
        if self._kept is not None:
            del self._kept[: given - (self.given - len(self._kept))]

    def rewind(self) -> None:
        """Give everything since `mark` again."""
        self._drawn.extendleft(reversed(self._kept or []))
        self.mark(keep=False)
