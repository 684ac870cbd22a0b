"""Programs by their sizes, the latest used within a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from megatron_zbpp.mcore.lowered import Lowered, Size


class ProgramsAhead:
    """Makes the programs between the least and the most microbatches so far, the nearest first."""

    def __init__(self, cache: ProgramCache) -> None:
        self._cache = cache
        self._ends: dict[Size, tuple[int, int]] = {}  # least and most, by the rest of the size
        self._lock = threading.Lock()
        self._todo: deque[Size] = deque()
        self._generation = 0
        self._thread: threading.Thread | None = None

    def follow(self, size: Size, recent: Iterable[int], num_passes: int) -> None:
        """Make what lies near a size, from now on."""
        rest, m = size._replace(num_microbatches=0), size.num_microbatches
        counts = [*recent, *self._ends.get(rest, ())]
        self._ends[rest] = least, most = min(counts), max(counts)
        room, todo = self._cache.room, []
        for count in sorted(range(least, most + 1), key=lambda count: abs(count - m)):
            other = size._replace(num_microbatches=count)
            if other in self._cache:
                continue
            room -= -(-num_passes * count // m)
            if room < 0:
                break
            todo.append(other)
        with self._lock:
            self._todo = deque(todo)
            if todo and self._thread is None:
                self._thread = threading.Thread(target=self._work, name='programs', daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Begin no further program, and keep none that is being made."""
        with self._lock:
            self._generation += 1
            self._todo.clear()

    def wait(self) -> None:
        """Return once all that was to be made has been."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            size, generation = found
            try:
                made = self._cache.make(size)
            except ValueError:
                continue  # the call that has this size raises it
            with self._lock:
                if generation == self._generation:
                    self._cache.keep(size, made)

    def _next(self) -> tuple[Size, int] | None:
        with self._lock:
            while self._todo:
                size = self._todo.popleft()
                if size not in self._cache:
                    return size, self._generation
            self._thread = None
            return None


MOST_PASSES = 2**18  # of all ranks, some 500 bytes each: 130 MiB
_OFTEN = 12  # times that programs are asked for, a few in each call, between two changes


class ProgramCache:
    """Keeps programs; the least recently used ones go when they have too many passes.

    Args:
        make: the programs of a size; ValueError where there are none.
        most_passes: kept at most, but for the latest.

    Attributes:
        ahead: makes programs of other sizes; None: sizes do not vary from call to call.
    """

    def __init__(self, make: Callable[[Size], Lowered], most_passes: int = MOST_PASSES) -> None:
        self.make, self._most = make, most_passes
        self.ahead: ProgramsAhead | None = None
        self._kept: OrderedDict[Size, Lowered] = OrderedDict()
        self._lock = threading.RLock()
        self._asked = 0  # times
        self._changes: dict[bool, list[tuple[int, int]]] = {}  # microbatches, and when; the latest

    def __contains__(self, size: Size) -> bool:
        return size in self._kept

    @property
    def sizes(self) -> list[Size]:
        """Sizes whose programs are kept, the least recently used first."""
        with self._lock:
            return list(self._kept)

    @property
    def num_passes(self) -> int:
        """Passes of all that is kept."""
        with self._lock:
            return sum(each.num_passes for each in self._kept.values())

    @property
    def room(self) -> int:
        """Passes that may still be kept."""
        return self._most - self.num_passes

    def get(self, size: Size) -> Lowered:
        """Return the programs of `size`, kept or made now."""
        with self._lock:
            found = self._kept.get(size)
            if found is not None:
                self._kept.move_to_end(size)
        if found is None:
            found = self.make(size)
            self.keep(size, found)
        self._asked += 1
        changes = self._changes.setdefault(size.forward_only, [])
        if not changes or changes[-1][0] != size.num_microbatches:
            changes[:] = [*changes[-2:], (size.num_microbatches, self._asked)]
            self._look_ahead(size, changes, found.num_passes)
        return found

    def _look_ahead(self, size: Size, changes: list[tuple[int, int]], num_passes: int) -> None:
        """Have programs of other numbers of microbatches made, where these vary."""
        if self.ahead is None and len(changes) > 2 and self._asked - changes[1][1] < _OFTEN:
            self.ahead = ProgramsAhead(self)
        if self.ahead is not None:
            self.ahead.follow(size, [count for count, _ in changes], num_passes)

    def keep(self, size: Size, made: Lowered) -> None:
        """Keep it as the latest used, and drop the least recently used beyond the bound."""
        with self._lock:
            self._kept[size] = made
            self._kept.move_to_end(size)
            while len(self._kept) > 1 and self.room < 0:
                self._kept.popitem(last=False)

    def drop(self, goes: Callable[[Size], bool] = lambda _: True) -> None:
        """Forget those that go: they would be made in another way now."""
        if self.ahead is not None:
            self.ahead.stop()
        with self._lock:
            for size in [size for size in self._kept if goes(size)]:
                del self._kept[size]
