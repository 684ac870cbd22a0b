"""A schedule in Megatron's ranks, and its proven programs, kept by their sizes.

A schedule whose placement ends on rank 0 (every V) is run with its ranks reversed, as a Λ: loss and
embedding are on the last rank, where Megatron's loss logging, evaluation, token counts and output
casts expect the loss.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_zbpp.analysis.program import LATE, Begin, Program, Send
from megatron_zbpp.analysis.run_ahead import passes_run_ahead, split
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.runtime.tables import Tables

if TYPE_CHECKING:
    from megatron_zbpp.techniques.updates.calls import Calls


def for_megatron(schedule: Schedule) -> Schedule:
    """Return `schedule`, its ranks reversed if that brings the loss to the last rank.

    A two-way one is over two replicas of the pipeline: see `Placement.folded`.
    """
    one = one_replica(schedule.placement)
    last = one.num_ranks - 1
    if one.only_route[-1] != last:
        raise ValueError(
            f'{schedule.name} places the last stage on rank {last - one.only_route[-1]}: '
            f'Megatron needs it on the first or last rank (0 or {last})'
        )
    if not schedule.placement.is_one_way:
        return schedule.over_replicas(one)
    return schedule if schedule.placement == one else schedule.reversed()


def one_replica(placement: Placement) -> Placement:
    """Return where a replica has its stages, reversed if they do not end on the last rank."""
    one = placement.folded()
    return one if one.only_route[-1] == one.num_ranks - 1 else one.reversed()


class Size(NamedTuple):
    """The size of a call, by which programs are kept."""

    num_ranks: int  # p
    num_microbatches: int  # m
    forward_only: bool  # whether there are no backwards
    together: bool  # whether pairs of F and BW are to run as one
    draining: bool = False  # whether a synchronous schedule runs in place of an asynchronous one
    receives: str = LATE  # when they are posted


@dataclass(frozen=True, eq=False)
class Lowered:
    """A checked schedule as programs, in Megatron's ranks."""

    schedule: Schedule  # as it was checked
    programs: tuple[Program, ...]  # of all ranks
    # how many of its first passes each rank may run before an iteration begins
    ahead: tuple[int, ...]
    # of an asynchronous schedule, which goes on from call to call; None: it is none
    calls: Calls | None = None

    @property
    def placement(self) -> Placement:
        return self.schedule.placement

    @functools.cached_property
    def num_passes(self) -> int:
        return sum(map(len, self.schedule.passes))

    @functools.cached_property
    def moves(self) -> bool:
        """True if activations leave the device."""
        return bool(self.partners) or any(isinstance(i, Begin) for p in self.programs for i in p)

    @functools.cached_property
    def partners(self) -> frozenset[tuple[int, int]]:
        """Pairs of ranks, of which one sends the other what forwards have saved."""
        each = ((rank, i) for rank, program in enumerate(self.programs) for i in program)
        return frozenset((rank, i.peer) for rank, i in each if isinstance(i, Send) and i.saved)

    @functools.lru_cache(64)  # noqa: B019 - as many as ranks; they end with the session's programs
    def tables(self, rank: int, ranks_ahead: int) -> tuple[Tables, int]:
        """Return the program of a rank with its tables, and how many instructions come ahead."""
        passes = passes_run_ahead(self.schedule, self.ahead, ranks_ahead) if ranks_ahead else set()
        first, rest = split(self.programs[rank], passes)
        return Tables(first + rest), len(first)


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
        if (thread := self._thread) is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._thread = None
                    return
                size, generation = self._todo.popleft(), self._generation
            if size in self._cache:
                continue
            try:
                made = self._cache.make(size)
            except ValueError:
                continue  # the call that has this size raises it
            with self._lock:
                if generation == self._generation:
                    self._cache.keep(size, made)


MOST_PASSES = 2**18  # of all ranks, some 500 bytes each: 130 MiB
_OFTEN = 12  # times that programs are asked for, a few in each call, between two changes


class ProgramCache:
    """Keeps programs; the least recently used ones go when they have too many passes."""

    def __init__(self, make: Callable[[Size], Lowered], most_passes: int = MOST_PASSES) -> None:
        self.make, self._most = make, most_passes
        self.ahead: ProgramsAhead | None = None  # None: sizes do not vary from call to call
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
            if self.ahead is None and len(changes) > 2 and self._asked - changes[1][1] < _OFTEN:
                self.ahead = ProgramsAhead(self)  # numbers of microbatches vary
            if self.ahead is not None:
                self.ahead.follow(size, [count for count, _ in changes], found.num_passes)
        return found

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
