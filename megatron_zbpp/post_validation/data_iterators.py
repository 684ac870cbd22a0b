"""Data iterators for forwards that run ahead of their call.

`ReplayIterator` can be wound back: such forwards may have to run once more. `SharedIterators` gives
the chunks of a model iterators that stay the same. A loop that makes them anew for each iteration,
as Megatron-Bridge's does, leaves none with which forwards of the next iteration could begin.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any


class ReplayIterator:
    """Gives what `source` gives; items may be drawn early, and given again."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source  # the iterator
        self.given = 0  # how many items it has given since `mark`
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


_KEPT = 4  # sources at once: of training, validation, test


class ChunkIterator:
    """Gives a chunk what `shared` draws, from where the chunk is."""

    def __init__(self, shared: SharedSource) -> None:
        self._shared = shared
        self.at: int | None = 0  # how many items it has given; None: its chunk reads no data

    def __iter__(self) -> ChunkIterator:
        return self

    def __next__(self) -> Any:
        if self.at is None:
            raise RuntimeError(
                'a chunk that read no data in its first iteration reads some now: leave out '
                'post_validation'
            )
        item = self._shared.item(self.at)
        self.at += 1
        return item


class SharedSource:
    """Draws from `source` once for all of its views."""

    def __init__(self, source: Iterator[Any], num_views: int) -> None:
        self.source = source
        self.views = [ChunkIterator(self) for _ in range(num_views)]
        self._drawn: deque[Any] = deque()
        self._first = 0  # the number of the oldest item that is kept

    def item(self, number: int) -> Any:
        """Return the item of that number, from 0."""
        while number >= self._first + len(self._drawn):
            self._drawn.append(next(self.source))
        return self._drawn[number - self._first]

    def begin(self) -> list[ChunkIterator]:
        """Return the views for one more iteration; what all have read is forgotten."""
        if any(view.at for view in self.views):
            for view in self.views:
                view.at = view.at or None
            oldest = min(view.at for view in self.views if view.at is not None)
            for _ in range(oldest - self._first):
                self._drawn.popleft()
            self._first = oldest
        return list(self.views)


class SharedIterators:
    """The views of the iterators of a training, each made once."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, SharedSource] = OrderedDict()

    def of(self, source: Iterator[Any] | None, num_views: int) -> list[ChunkIterator | None]:
        """Return iterators of `source`, the same as before; None each where a rank has no data."""
        if source is None:
            return [None] * num_views
        shared = self._known.get(id(source))
        if shared is None:
            shared = self._known[id(source)] = SharedSource(source, num_views)
        self._known.move_to_end(id(source))
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return list(shared.begin())
