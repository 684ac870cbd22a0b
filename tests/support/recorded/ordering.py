"""Reads a device's log: what happens before what, by vector clocks, and which uses nothing orders.

A stream runs its kernels in order. An event carries what its stream has done; who waits for it, a
stream or the host, comes behind that. What the host launches comes behind all that the host has
waited for. Two uses of the same bytes, of which one writes, have to be in order.

Memory that is freed may be given to the stream that allocated it, at once. So whatever other
streams did with it is to be before the next kernel of that stream; or `record_stream` has told the
allocator, which then keeps it until the host sees an event of theirs.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

HOST, REGISTERED = -1, -2  # as streams: who uses memory, or has allocated it
_QUERIES = ('event.query', 'work.is_completed')  # tell the host what is done; it does not wait


# records of `device.cpp`
Kind = enum.IntEnum(
    'Kind',
    'KERNEL RECORD WAIT HOST_EVENT HOST_STREAM HOST_DEVICE ALLOCATE FREE RECORD_STREAM NOTE',
    start=0,
)
Clock = dict[int, int]  # how many kernels of each stream are before


@dataclass(frozen=True)
class Use:
    kernel: str  # its name
    stream: int  # it runs on
    within: str  # the pass that launched it; empty between passes
    thread: int  # that launched it, by number

    def __str__(self) -> str:
        place = 'the host' if self.stream == HOST else f'stream {self.stream}'
        return f'{self.kernel} on {place} in {self.within or "no pass"}'


@dataclass(frozen=True)
class Race:
    """Two uses of the same bytes that nothing orders."""

    first: Use  # as they were launched
    second: Use
    freed: bool = False  # whether `second` is the first kernel that may get the memory anew

    def __str__(self) -> str:
        if self.freed:
            return f'memory is free for {self.second}, though {self.first} may use it still'
        return f'{self.second} does not wait for {self.first}'


@dataclass(frozen=True)
class Wait:
    what: str  # for what
    within: str  # the pass; empty between passes


@dataclass
class _Block:
    nbytes: int = 0
    owner: int = HOST
    # by first and last byte, stream, and whether it writes: its count and the latest such kernel
    uses: dict[tuple[int, int, int, bool], tuple[int, Use]] = field(default_factory=dict)
    last: dict[int, tuple[int, Use]] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)


@dataclass
class Order:
    names: Callable[[int], str]
    # uses that nothing orders, each pair of kernels, streams and passes once
    races: dict[Race, int] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)  # of the host
    uses: list[Use] = field(default_factory=list)  # all kernels, in order of launch
    # bytes of each allocation of page-locked memory of the host
    page_locked: list[int] = field(default_factory=list)
    # bytes of those that have not been freed, by number of the block
    locked: dict[int, int] = field(default_factory=dict)
    planned: int = 0  # peak bytes of the device, if memory comes back once it is freed
    in_passes: int = 0  # the same, of passes alone
    # peak bytes as the allocator has them while the host runs ahead as far as it can: what another
    # stream has recorded comes back once the host has waited for that stream
    held: int = 0
    # of those that were freed and have not come back, the most at once, by the kernels of other
    # streams that have used them last
    late: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clocks: dict[int, Clock] = {HOST: {}}
        self._behind: dict[int, int] = {}  # of each stream: how often the host had waited
        self._host_waits = 0
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, _Block] = {}
        self._freed: dict[int, list[_Block]] = {}  # by stream, since its latest kernel
        self._kept: list[tuple[_Block, Clock]] = []  # freed, while others have recorded it
        self._within = ''
        self._bytes = self._held_bytes = 0

    def read(self, words: Sequence[int]) -> Order:
        """Go on with more of the log."""
        at = 0
        while at < len(words):
            take, length = self._READ[words[at]]
            if length is None:
                length = 5 + 4 * words[at + 4]
                take(self, *words[at + 1 : at + 4], *words[at + 5 : at + length])
            else:
                take(self, *words[at + 1 : at + length])
            at += length
        return self

    # One record each

    def _kernel(self, stream: int, thread: int, name: int, *accesses: int) -> None:
        clock = self._clock(stream)
        self._join_host(stream, clock)
        use = Use(self.names(name), stream, self._within, thread)
        self.uses.append(use)
        self._give_anew(stream, clock, use)
        clock[stream] = count = clock.get(stream, 0) + 1
        self._host_waits += stream == HOST  # what it launches comes behind what it does
        for at in range(0, len(accesses), 4):
            writes, block, begin, end = accesses[at : at + 4]
            found = self._blocks.setdefault(block, _Block())
            self._access(found, (begin, end, stream, bool(writes)), count, use)
            found.last[stream] = count, use

    def _record(self, stream: int, event: int) -> None:
        clock = self._clock(stream)
        self._join_host(stream, clock)
        self._events[event] = dict(clock)

    def _wait(self, stream: int, event: int) -> None:
        _join(self._clock(stream), self._events.get(event, {}))

    def _host_event(self, event: int, name: int, thread: int) -> None:
        self._host_waited(self._events.get(event, {}), name)

    def _host_stream(self, stream: int, name: int, thread: int) -> None:
        self._host_waited(self._clock(stream), name)

    def _host_device(self, name: int, thread: int) -> None:
        for stream in [*self._clocks]:
            self._host_waited(self._clock(stream), None)
        self._host_waited({}, name)

    def _allocate(self, block: int, nbytes: int, stream: int) -> None:
        self._blocks[block] = _Block(nbytes, stream)
        if stream in (HOST, REGISTERED):
            self.page_locked.append(nbytes)
            self.locked[block] = nbytes
            return
        self._poll()
        self._bytes += nbytes
        self._held_bytes += nbytes
        self.planned = max(self.planned, self._bytes)
        self.in_passes = max(self.in_passes, self._bytes if self._within else 0)
        self.held = max(self.held, self._held_bytes)

    def _free(self, block: int, thread: int) -> None:
        found = self._blocks.pop(block, None)
        self.locked.pop(block, None)
        if found is None or found.owner == HOST:  # torch's page-locked memory waits for its copies
            return
        if found.owner == REGISTERED:
            self._unlock(found, thread)
            return
        self._bytes -= found.nbytes
        self._freed.setdefault(found.owner, []).append(found)
        others = {s: self._clock(s).get(s, 0) for s in found.recorded if s != found.owner}
        self._kept.append((found, others))

    def _unlock(self, block: _Block, thread: int) -> None:
        """Nobody waits for copies of memory that the host has locked by address."""
        for stream, (count, last) in block.last.items():
            if self._clocks[HOST].get(stream, 0) < count:
                self._found(Race(last, Use('unlock', HOST, self._within, thread), freed=True))

    def _record_stream(self, block: int, stream: int) -> None:
        if block in self._blocks:
            self._blocks[block].recorded.add(stream)

    def _note(self, name: int, thread: int) -> None:
        self._within = self.names(name)

    # of each `Kind`: what reads it, and how many words it has; None: as many as it says
    _READ: ClassVar[list[tuple[Callable[..., None], int | None]]] = [
        (_kernel, None), (_record, 3), (_wait, 3), (_host_event, 4), (_host_stream, 4),
        (_host_device, 3), (_allocate, 4), (_free, 3), (_record_stream, 3), (_note, 3),
    ]  # fmt: skip

    # Clocks

    def _clock(self, stream: int) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _join_host(self, stream: int, clock: Clock) -> None:
        """Put what is launched behind all that the host has waited for."""
        if self._behind.get(stream) != self._host_waits:
            _join(clock, self._clocks[HOST])
            self._behind[stream] = self._host_waits

    def _host_waited(self, clock: Clock, name: int | None) -> None:
        self._host_waits += 1
        _join(self._clocks[HOST], clock)
        if name is not None and (what := self.names(name)) not in _QUERIES:
            self.waits.append(Wait(what, self._within))

    # Memory

    def _access(self, block: _Block, key: tuple[int, int, int, bool], count: int, use: Use) -> None:
        begin, end, stream, writes = key
        clock = self._clocks[stream]
        for (first, last, other, wrote), (earlier, earlier_use) in block.uses.items():
            same_bytes = max(first, begin) < min(last, end)
            ordered = other == stream or clock.get(other, 0) >= earlier
            if same_bytes and (writes or wrote) and not ordered:
                self._found(Race(earlier_use, use))
        if writes:  # what it covers is before whatever comes behind it
            block.uses = {k: v for k, v in block.uses.items() if k[0] < begin or k[1] > end}
        block.uses[key] = count, use

    def _give_anew(self, stream: int, clock: Clock, use: Use) -> None:
        """Let a kernel have the memory that its stream freed."""
        for block in self._freed.pop(stream, ()):
            for other, (count, last) in block.last.items():
                known = other == stream or other in block.recorded
                if not known and clock.get(other, 0) < count:
                    self._found(Race(last, use, freed=True))

    def _poll(self) -> None:
        """Look which memory the host knows to be free, as the allocator does when it is asked."""
        host, kept = self._clocks[HOST], []
        for block, others in self._kept:
            if all(host.get(stream, 0) >= count for stream, count in others.items()):
                self._held_bytes -= block.nbytes
            else:
                kept.append((block, others))
        self._kept = kept
        now = Counter[str]()
        for block, others in kept:
            uses = {block.last[stream][1].kernel for stream in others if stream in block.last}
            now[' '.join(sorted(uses))] += block.nbytes
        self.late = {name: max(now[name], self.late.get(name, 0)) for name in {*now, *self.late}}

    def _found(self, race: Race) -> None:
        self.races[race] = self.races.get(race, 0) + 1


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count
