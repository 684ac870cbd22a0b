"""One clock for all ranks of a pipeline: their hosts' clocks do not agree.

Each rank asks its neighbour for the time, as NTP does (RFC 5905, section 8). What is left of the
error, half a round trip at most between neighbours, must not let a message arrive before it was
sent: causality corrects it. Clocks drift, so that nothing is kept: asking takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.runtime.clock import Clock
from megatron_zbpp.runtime.groups import host_device

_TRIPS = 8  # the first ones wait for a neighbour that is still busy


@dataclass(frozen=True)
class RoundTrip:
    """A question for the time, and its answer; in seconds.

    Attributes:
        asked: by the clock of who asks.
        told: by the clock of who answers, some time in between.
        answered: by the clock of who asks.
    """

    asked: float
    told: float
    answered: float

    @property
    def length(self) -> float:
        return self.answered - self.asked


def lead(trips: Sequence[RoundTrip]) -> float:
    """Return how much the asking clock is ahead; off by half the shortest trip at most."""
    best = min(trips, key=lambda trip: trip.length)
    return (best.asked + best.answered) / 2 - best.told


def lead_of_neighbour(clock: Clock, group: dist.ProcessGroup) -> float:
    """Return how much this rank's clock is ahead of the previous rank's: a collective; rank 0: 0.

    Even ranks answer while odd ones ask, then the other way: no rank waits for more than two.
    """
    rank, found = dist.get_rank(group), 0.0
    for answering in (0, 1):
        if rank % 2 != answering and rank > 0:
            found = lead(_ask(clock, group, rank - 1))
        elif rank % 2 == answering and rank + 1 < dist.get_world_size(group):
            _answer(clock, group, rank + 1)
    return found


def _ask(clock: Clock, group: dist.ProcessGroup, neighbour: int) -> list[RoundTrip]:
    peer, told = dist.get_global_rank(group, neighbour), _empty(group)
    trips = []
    for _ in range(_TRIPS):
        asked = clock.now()
        dist.send(told, peer, group)
        dist.recv(told, peer, group)
        seconds = told.item()  # waits for the device
        trips.append(RoundTrip(asked, seconds, clock.now()))
    return trips


def _answer(clock: Clock, group: dist.ProcessGroup, neighbour: int) -> None:
    peer, told = dist.get_global_rank(group, neighbour), _empty(group)
    for _ in range(_TRIPS):
        dist.recv(told, peer, group)
        told.item()  # waits for the device
        dist.send(told.fill_(clock.now()), peer, group)


def _empty(group: dist.ProcessGroup) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=host_device(group))


def on_one_clock(timeline: Timeline, leads: Sequence[float]) -> Timeline:
    """Return `timeline` by the clock of rank 0.

    Args:
        timeline: each rank's spans by its own clock.
        leads: by rank: of its clock, ahead of the previous rank's.
    """
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
