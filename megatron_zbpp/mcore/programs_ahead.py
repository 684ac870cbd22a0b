"""Programs for other numbers of microbatches, made in a thread while a call runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from megatron_zbpp.mcore.lowered import Lowered, Size


class Cache(Protocol):
    """Programs by their sizes, as far as there is room."""

    make: Callable[[Size], Lowered]

    @property
    def room(self) -> int: ...

    def __contains__(self, size: Size) -> bool: ...

    def keep(self, size: Size, made: Lowered) -> None: ...


class ProgramsAhead:
    """Makes the programs between the least and the most microbatches so far, the nearest first.

    Args:
        cache: that keeps them, as far as it has room.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._ends: dict[Size, tuple[int, int]] = {}  # least and most, by the rest of the size
        self._lock = threading.Lock()
        self._todo: deque[Size] = deque()
        self._generation = 0
        self._thread: threading.Thread | None = None

    def follow(self, size: Size, recent: Iterable[int], num_passes: int) -> None:
        """Make what lies near a size, from now on.

        Args:
            size: of the call that begins.
            recent: microbatches of this call and of those before it.
            num_passes: of its programs.
        """
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
        """Make what is to be made, one after another."""
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
        """Return what to make, and the generation; None: nothing, and the thread ends."""
        with self._lock:
            while self._todo:
                size = self._todo.popleft()
                if size not in self._cache:
                    return size, self._generation
            self._thread = None
            return None
