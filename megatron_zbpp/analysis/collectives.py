"""Collectives of the pipeline's ranks in a timeline: when they ran, and how long they take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import inf
from statistics import median
from typing import NamedTuple

from megatron_zbpp.ir import Pass
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import BROADCAST
from megatron_zbpp.ir.timeline import Timeline


class _Key(NamedTuple):
    """A message of all ranks: its name, microbatch and slice."""

    message: str
    microbatch: int
    slice: int


class CollectiveSpan(NamedTuple):
    """A collective with its start and end, on the clock of its timeline."""

    operation: str  # as in `ir.graph.Collective`
    message: str  # its name
    microbatch: int  # of the passes that contribute
    slice: int  # likewise
    start: float  # when all have contributed, and the collective whose result they need is over
    end: float  # no later than the first pass that takes the result


def collective_spans(timeline: Timeline, costs: Costs | None = None) -> list[CollectiveSpan]:
    """Return each collective, those of one message in the order of their starts.

    A timeline has times of passes only. So a collective begins where the last of its passes ends,
    and takes as long as costs say; without costs, or of messages that they do not name, until a
    pass takes the result.

    Args:
        timeline: simulated or measured.
        costs: of its schedule, in its unit.
    """
    all_of = timeline.schedule.graph.collectives
    times: Mapping[str, float] = {} if costs is None else costs.collectives
    ends: dict[_Key, float] = {}
    found: list[CollectiveSpan] = []
    bounds = _bounds(timeline)
    for key in sorted(bounds, key=lambda key: (bool(all_of[key.message].after), key)):
        own, (made, taken) = all_of[key.message], bounds[key]
        start = max(made, ends.get(key._replace(message=own.after), made))
        ends[key] = end = max(start, min(taken, start + times.get(key.message, inf)))
        found.append(CollectiveSpan(own.operation, *key, start, end))
    return sorted(found, key=lambda each: (each.message, each.start))


def collective_times(timeline: Timeline) -> dict[str, float]:
    """Return the usual time of each collective, from the last contribution on: medians.

    Only passes count whose rank was idle for most of that time, as others may have started late
    because their rank was busy. A message for which none waited takes no longer than the shortest
    that was seen, nor, it is supposed, than the slowest for which some did. What waits for another
    collective takes that one's time less.
    """
    schedule, spans = timeline.schedule, timeline.by_pass
    all_of, bounds = schedule.graph.collectives, _bounds(timeline)
    waited: dict[str, dict[_Key, float]] = defaultdict(dict)
    for order in schedule.passes if all_of else ():
        idle_since = -inf
        for p in order:
            start, end = spans[p]
            for key in _taken(timeline, p):
                made = bounds[key][0]
                if idle_since <= (made + start) / 2:
                    own = waited[key.message]
                    own[key] = min(start - made, own.get(key, inf))
            idle_since = end
    shortest: dict[str, float] = {}
    for key, (made, taken) in bounds.items():
        shortest[key.message] = max(0.0, min(taken - made, shortest.get(key.message, inf)))
    usual = {message: median(times.values()) for message, times in waited.items()}
    slowest = max(usual.values(), default=inf)
    whole = {
        message: usual.get(message, min(bound, slowest)) for message, bound in shortest.items()
    }
    return {
        message: max(0.0, took - whole.get(all_of[message].after, 0.0))
        for message, took in whole.items()
    }


def _taken(timeline: Timeline, p: Pass) -> Iterator[_Key]:
    """Yield the collectives whose results `p` takes; of a broadcast, on other ranks alone."""
    schedule, all_of = timeline.schedule, timeline.schedule.graph.collectives
    for need, q in schedule.needs(p):
        if need.message is not None and need.message in all_of:
            elsewhere = schedule.rank_of(p) != schedule.rank_of(q)
            if elsewhere or all_of[need.message].operation != BROADCAST:
                yield _Key(need.message, q.microbatch, q.slice)


def _bounds(timeline: Timeline) -> dict[_Key, tuple[float, float]]:
    """Return when the last pass contributed to each collective, and when its result was there."""
    schedule, spans = timeline.schedule, timeline.by_pass
    all_of = schedule.graph.collectives
    made: dict[_Key, float] = {}
    taken: dict[_Key, float] = defaultdict(lambda: inf)
    for p, (start, _) in spans.items() if all_of else ():
        for need, q in schedule.needs(p):
            if need.message is not None and need.message in all_of:
                key = _Key(need.message, q.microbatch, q.slice)
                made[key] = max(spans[q][1], made.get(key, -inf))
        for key in _taken(timeline, p):
            taken[key] = min(start, taken[key])
    for key, start in list(taken.items()):
        before = key._replace(message=all_of[key.message].after)
        if before in taken:
            taken[before] = min(start, taken[before])
    return {key: (end, taken[key]) for key, end in made.items() if key in taken}
