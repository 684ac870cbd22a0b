"""Measurements of all ranks of a pipeline: one iteration on one clock, and means of many.

Hosts' clocks do not agree: each rank asks its neighbour for the time, as NTP does (RFC 5905,
section 8). What is left of the error, half a round trip at most between neighbours, must not let a
message arrive before it was sent: causality corrects it. Clocks drift, so that nothing is kept:
asking takes milliseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import fsum
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_zbpp.ir import F, Schedule, W, strict_json
from megatron_zbpp.ir.timeline import Timeline, idle
from megatron_zbpp.runtime.clock import Clock, Record
from megatron_zbpp.runtime.groups import gather_objects, host_device

_TRIPS = 8  # the first ones wait for a neighbour that is still busy


@dataclass(frozen=True)
class RoundTrip:
    """A question for the time, and its answer; in seconds."""

    asked: float  # by the clock of who asks
    told: float  # by the clock of who answers, some time in between
    answered: float  # by the clock of who asks


def lead(trips: Sequence[RoundTrip]) -> float:
    """Return how much the asking clock is ahead; off by half the shortest trip at most."""
    best = min(trips, key=lambda trip: trip.answered - trip.asked)
    return (best.asked + best.answered) / 2 - best.told


def lead_of_neighbour(clock: Clock, group: dist.ProcessGroup) -> float:
    """Return how much this rank's clock is ahead of the previous rank's: a collective; rank 0: 0.

    Even ranks answer while odd ones ask, then the other way: no rank waits for more than two.
    """
    rank, ranks, found = dist.get_rank(group), dist.get_process_group_ranks(group), 0.0
    told = torch.zeros((), dtype=torch.float64, device=host_device(group))
    for answering in (0, 1):
        if rank % 2 != answering and rank > 0:
            found = lead(_ask(clock, group, ranks[rank - 1], told))
        elif rank % 2 == answering and rank + 1 < len(ranks):
            _answer(clock, group, ranks[rank + 1], told)
    return found


def _ask(clock: Clock, group: dist.ProcessGroup, peer: int, told: torch.Tensor) -> list[RoundTrip]:
    trips = []
    for _ in range(_TRIPS):
        asked = clock.now()
        dist.send(told, peer, group)
        dist.recv(told, peer, group)
        seconds = told.item()  # waits for the device
        trips.append(RoundTrip(asked, seconds, clock.now()))
    return trips


def _answer(clock: Clock, group: dist.ProcessGroup, peer: int, told: torch.Tensor) -> None:
    for _ in range(_TRIPS):
        dist.recv(told, peer, group)
        told.item()  # waits for the device
        dist.send(told.fill_(clock.now()), peer, group)


def on_one_clock(timeline: Timeline, leads: Sequence[float]) -> Timeline:
    """Return `timeline` by the clock of rank 0; `leads`: each clock's, ahead of the rank before."""
    return causal(_later(timeline, [-ahead for ahead in accumulate(leads)]))


def causal(timeline: Timeline) -> Timeline:
    """Return `timeline` with ranks moved later, so little that no pass starts before its inputs.

    The moves are longest paths: a rank moves with those that it waits for.
    """
    between = timeline.lags()
    later = [0.0] * timeline.schedule.num_ranks
    for _ in later:  # as many rounds settle all, unless the clocks drifted during the iteration
        for (rank, other), lag in between.items():
            later[other] = max(later[other], later[rank] - lag)
    return _later(timeline, later)


def _later(timeline: Timeline, seconds: Sequence[float]) -> Timeline:
    spans = tuple(
        tuple((start + by, end + by) for start, end in own)
        for own, by in zip(timeline.spans, seconds, strict=True)
    )
    return Timeline(timeline.schedule, spans)


@dataclass(frozen=True)
class Measurement:
    """One iteration as it was."""

    timeline: Timeline  # passes with start and end in seconds of the first rank's clock
    # most that each rank held, in activations of one microbatch on a full rank
    peak_activations: tuple[float, ...]

    def to_json(self) -> str:
        """Return one JSON object; `from_json` reads it back to an equal value."""
        return json.dumps(
            {
                'schedule': json.loads(self.timeline.schedule.to_json()),
                'spans': self.timeline.spans,
                'peak_activations': self.peak_activations,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Return the measurement that `to_json` wrote; ValueError names a field that is wrong."""
        data: Any = strict_json.loads(text)
        strict_json.require(data, _FIELDS)
        schedule = Schedule.from_object(data['schedule'])
        spans = tuple(tuple((start, end) for start, end in rank) for rank in data['spans'])
        if [*map(len, spans)] != [*map(len, schedule.passes)]:
            raise ValueError("'spans': there must be one for each pass of each rank")
        peaks = tuple(data['peak_activations'])
        if len(peaks) != schedule.num_ranks:
            raise ValueError("'peak_activations': there must be one for each rank")
        return cls(Timeline(schedule, spans), peaks)


_SPAN = strict_json.tuple_of(strict_json.number, strict_json.number)
_FIELDS = {
    'schedule': strict_json.anything,
    'spans': strict_json.list_of(strict_json.list_of(_SPAN, 'spans'), 'lists of [start, end]'),
    'peak_activations': strict_json.list_of(strict_json.number, 'numbers'),
}


class RankTiming(NamedTuple):
    """One iteration of one rank in three numbers, which need no common clock."""

    window: float  # seconds from its first start to its last end
    work: float  # seconds in its passes
    live: float  # most that it held, in activations of one microbatch on a full rank


@dataclass(frozen=True)
class Figures:
    """One or more iterations of a pipeline, in what a line of a log tells of them."""

    bubble: float  # share of the longest window in which even the busiest rank idles; the mean
    idle: float  # share of all ranks' time in the longest window that no pass takes; the mean
    live: float  # most that any rank held, in activations of one microbatch on a full rank
    iterations: int = 1  # how many they are of
    # optimizer steps that were taken before all ranks had agreed; None: none can be
    early_steps: int | None = None
    taken_back: int = 0  # how many of them did not stand

    @classmethod
    def of(cls, extents: Iterable[Sequence[RankTiming]]) -> Figures:
        """Return the figures of iterations, each measured on all ranks."""
        bubbles, lost, live = [], [], 0.0
        for ranks in zip(*extents, strict=True):
            longest = max(extent.window for extent in ranks)
            work = [extent.work for extent in ranks]
            bubbles.append(idle(longest, max(work)))
            lost.append(idle(longest * len(work), fsum(work)))
            live = max(live, *(extent.live for extent in ranks))
        return cls(fmean(bubbles), fmean(lost), live, len(bubbles))

    def __str__(self) -> str:
        steps = ''
        if self.early_steps is not None:
            steps = f' early steps: {self.early_steps}/{self.iterations}, '
            steps += f'taken back: {self.taken_back} |'
        return (
            f'idle GPU time: {self.idle:.1%} | pipeline bubble: {self.bubble:.1%} | '
            f'live activations: {self.live:.1f} |{steps}'
        )


@dataclass(frozen=True)
class Iteration:
    """The record of one iteration on one rank, and its figures."""

    schedule: Schedule  # that ran
    pp_group: dist.ProcessGroup  # the pipeline
    record: Record  # this rank's passes
    clock: Clock  # that took the record's marks

    def spans(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each pass in seconds of this host's clock; may synchronise.

        Two that ran as one have half of their time each.
        """
        seconds = self.clock.seconds
        for _, last in self.record.marks[-1:]:
            seconds(last)  # which the device comes to behind all others: ties them alike
        spans = [(seconds(start), seconds(end)) for start, end in self.record.marks]
        for at in self.record.joined:  # they share their time alike
            start, end = spans[at][0], spans[at + 1][1]
            spans[at], spans[at + 1] = (start, (start + end) / 2), ((start + end) / 2, end)
        return tuple(spans)

    def peak(self) -> float:
        """Return the most that this rank held, in activations of one microbatch on a full rank."""
        chunks = len(self.schedule.placement.stages(dist.get_rank(self.pp_group)))
        parts = 1 + max((p.slice for p in self.record.passes), default=0)  # of a sequence
        return max(self.record.live, default=0) / chunks / parts

    def held(self) -> dict[int, tuple[float, float]]:
        """Return by stage of this rank: bytes held from F to B, and (maybe more) from B to W.

        Medians of what each F adds and each W gives back, of all slices; nothing where the clock
        does not count. A stage whose Ws are all fused with Bs counts as one that gives nothing back
        before.
        """
        taken: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        joined = self.record.joined
        shared = {*joined, *(at + 1 for at in joined)}  # what each took is not known
        for at, (p, marks) in enumerate(zip(self.record.passes, self.record.marks, strict=True)):
            if at in shared:
                continue
            before, after = map(self.clock.allocated, marks)
            if before is None or after is None:
                return {}
            taken[p.stage, p.kind, p.slice].append(after - before)
        added: dict[tuple[int, str], float] = defaultdict(float)
        for (stage, kind, _), each in taken.items():
            added[stage, kind] += median(each)
        found = {}
        for stage in {stage for stage, kind in added if kind == F}:
            left = max(0.0, added[stage, F])
            found[stage] = left, max(0.0, -added[stage, W]) if (stage, W) in added else left
        return found

    def gather(self) -> Measurement:
        """Return the same iteration of all ranks, on one clock: a collective."""
        lead = lead_of_neighbour(self.clock, self.pp_group)
        spans, peaks, leads = self.from_all((self.spans(), self.peak(), lead))
        return Measurement(on_one_clock(Timeline(self.schedule, spans), leads), peaks)

    def extent(self) -> RankTiming:
        """Return this rank's part in three numbers; may wait for its end on the device."""
        marks, between = self.record.marks, self.clock.between
        if not marks:
            return RankTiming(0.0, 0.0, self.peak())
        work = fsum(between(start, end) for start, end in marks)
        return RankTiming(between(marks[0][0], marks[-1][1]), work, self.peak())

    def figures(self) -> Figures:
        """Return the figures of this iteration on all ranks: a small collective."""
        (extents,) = self.from_all(([self.extent()],))
        return Figures.of(extents)

    def from_all(self, own: tuple) -> Iterator[tuple]:
        """Return each entry of what all ranks of the pipeline have, by rank: a collective."""
        return zip(*gather_objects(own, self.pp_group), strict=True)


_MOST = 1000  # iterations that are kept, where nobody asks


@dataclass
class Interval:
    """Takes note of each iteration of one rank; no rank waits for another before it is asked."""

    latest: Iteration | None = None  # the latest iteration; None: there was none
    iterations: int = 0  # how many all means so far are of
    idle: float = 0.0  # the sum of their shares of idle time
    _extents: deque[RankTiming] = field(default_factory=lambda: deque(maxlen=_MOST))
    _due: bool = False
    _early: tuple[int, int] = (0, 0)

    def add(self, iteration: Iteration) -> None:
        """Take note of an iteration that has ended on the host, if not yet on the device."""
        self._settle()
        self.latest, self._due = iteration, True

    def figures(self, early: tuple[int, int] | None = None) -> Figures | None:
        """Return the mean since this was last asked; None: no iteration has ended since.

        A collective of the pipeline, which all its ranks must ask for after the same iteration.
        `early`: optimizer steps that this rank took early so far, and those that were taken back.
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
