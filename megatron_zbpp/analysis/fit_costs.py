"""Costs as they were measured; when the collectives of a timeline ran, and how long they took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import fsum, inf
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from megatron_zbpp.ir import B, F, Pass, Placement, Schedule, Together, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import BROADCAST, R, compiled
from megatron_zbpp.ir.timeline import Timeline

_Entry = TypeVar('_Entry')


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


def measured_costs(timeline: Timeline) -> Costs:
    """Return `fit` with the measured latencies, of pairs of ranks and of hops where they differ.

    Pairs of ranks that never waited for each other have the latency that is usual.
    """
    waits = _waits(timeline)
    pairs = _latencies(timeline, waits)
    costs = fit(timeline, median(pairs.values()) if pairs else 0.0)
    both = [(*way, pairs[a, b]) for a, b in sorted(pairs) for way in ((a, b), (b, a))]
    edges = tuple(both) if len({*pairs.values()}) > 1 else ()
    return replace(costs, edges=edges, hops=_hops(timeline, pairs, waits))


def fit(timeline: Timeline, comm: float = 0.0) -> Costs:
    """Return costs whose times are the means over the microbatches of `timeline`, by stage.

    So each rank has as much to do as it had, also where microbatches are not alike, as sequences of
    other lengths are; an iteration that something disturbed is for `middle` to leave out.

    Every kind of pass that computes has its times; copies have none, as nobody waits for their end.
    Times of slices are given for the whole sequence, with the share of each. Where a stage did not
    run again, R takes what its F took.

    Tasks have the times of the passes that do only them. Of a pass of several tasks the first that
    no pass does alone gets what is left, the others take no time. A forward and a backward that ran
    as one tell only what that took, over the sum of both: the first forward and the last backward
    of a stage find no other to run with. Activations are those of `Costs.uniform`. `comm` is the
    latency of an edge between ranks, in the unit of the timeline.
    """
    schedule = timeline.schedule
    spans = timeline.by_pass
    entries = (entry for rank in range(schedule.num_ranks) for entry in schedule.order(rank))
    # forwards and backwards of two microbatches that run as one
    cells = [e.passes for e in entries if isinstance(e, Together) and e.is_cell]
    shared = {p for cell in cells for p in cell}
    times = _times(schedule, {p: span for p, span in spans.items() if p not in shared})
    shares: list[float] = []
    for cell in cells:
        tasks = [
            (task.kind, p.stage, p.slice)
            for p in cell
            for task in schedule.graph.tasks(p.kind, p.stage, p.slice)
        ]
        alone = fsum(times[task] for task in tasks)
        if alone:
            shares.append((spans[cell[-1]][1] - spans[cell[0]][0]) / alone)
    sites, slices = schedule.graph.sites, range(schedule.graph.num_slices)

    def of_slices(kind: str, site: int) -> tuple[float, ...]:
        known = any((kind, site, part) in times for part in slices) or kind != R
        return tuple(times.get((kind if known else F, site, part), 0.0) for part in slices)

    kinds = dict.fromkeys((F, B, W, *(kind for kind, _, _ in times)))
    own = {kind: range(schedule.num_stages) if kind in (F, B, W) else sites for kind in kinds}
    found = {kind: [of_slices(kind, site) for site in where] for kind, where in own.items()}
    whole = {kind: tuple(map(fsum, sites)) for kind, sites in found.items()}
    parts = {
        kind: tuple(
            tuple(time / all_of_it if all_of_it else 1 / len(own) for time in own)
            for own, all_of_it in zip(found[kind], sums, strict=True)
        )
        for kind, sums in (whole.items() if len(slices) > 1 else ())
    }
    return Costs(
        whole,
        Costs.uniform(schedule.placement).amounts,
        comm,
        together=(fmean(shares) if shares else 0.0) or 1.0,
        parts=parts,
        collectives=collective_times(timeline),
    )


def _times(
    schedule: Schedule, spans: Mapping[Pass, tuple[float, float]]
) -> dict[tuple[str, int, int], float]:
    times: dict[tuple[str, int, int], float] = {}
    copies = compiled(schedule.graph).on_copy_engines
    taken: dict[tuple[tuple[str, ...], int, int], list[float]] = defaultdict(list)
    for p, (start, end) in spans.items():
        if p.kind in copies:
            continue
        kinds = tuple(task.kind for task in schedule.graph.tasks(p.kind, p.stage, p.slice))
        taken[kinds, p.stage, p.slice].append(end - start)
    for (kinds, *at), seconds in sorted(taken.items(), key=lambda found: len(found[0][0])):
        stage, part = at
        unknown = [kind for kind in kinds if (kind, stage, part) not in times]
        known = fsum(times.get((kind, stage, part), 0.0) for kind in kinds)
        times |= {(kind, stage, part): 0.0 for kind in unknown[1:]}
        if unknown:
            times[unknown[0], stage, part] = max(0.0, fmean(seconds) - known)
    return times


def _latencies(
    timeline: Timeline, waits: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Return the shortest latency of two ranks, by pairs: half of both ways, as clocks differ."""
    shortest = timeline.lags()
    ways = {(a, b): lag + shortest[b, a] for (a, b), lag in shortest.items() if a < b}
    pairs = {pair: max(0.0, both / 2) for pair, both in ways.items()}
    placement = timeline.schedule.placement
    if not placement.is_one_way:
        return pairs
    route = placement.only_route
    among = [key for key in waits if max(key) < len(route)]  # no sites of shards behind them
    waited = {(route[made], route[taken]) for made, taken in among}
    return {p: time for p, time in pairs.items() if {p, p[::-1]} <= waited} or pairs


def _hops(
    timeline: Timeline,
    pairs: Mapping[tuple[int, int], float],
    shortest: Mapping[tuple[int, int], float],
) -> tuple[tuple[float, float], ...]:
    """Return each hop's time beyond its ranks' shortest latency, half each way; empty: none."""
    placement = timeline.schedule.placement
    if not placement.is_one_way:
        return ()
    between = [(min(pair), max(pair)) for pair in pairwise(placement.only_route)]
    more = [0.0] * len(between)
    for s, pair in enumerate(between):  # within a rank there is no message
        there, back = shortest.get((s, s + 1)), shortest.get((s + 1, s))
        if pair in pairs and between.count(pair) > 1 and there is not None and back is not None:
            more[s] = max(0.0, (there + back) / 2 - pairs[pair])
    return tuple((time, time) for time in more) if any(more) else ()


def _waits(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Return the shortest time from a pass's end to its taker's start, by their stages."""
    schedule, spans = timeline.schedule, timeline.by_pass
    flat = compiled(schedule.graph)
    shortest: dict[tuple[int, int], float] = {}
    for order in schedule.passes:
        idle_since = -inf
        for p in order:
            start, end = spans[p]
            for need, q in schedule.needs(p):
                made, key = spans[q][1], (q.stage, p.stage)
                if need.message not in schedule.graph.collectives and made >= idle_since:
                    shortest[key] = min(start - made, shortest.get(key, inf))
            idle_since = idle_since if p.kind in flat.on_copy_engines else end
    return shortest


def middle(found: Sequence[Costs]) -> Costs:
    """Return costs whose times are the medians of several measurements of the same stages."""
    first = found[0]
    kinds = [kind for kind in first.times if all(kind in costs.times for costs in found)]
    # measurements without hops have 0 for each
    stages = max(len(costs.hops) for costs in found)
    whole = [costs.hops or ((0.0, 0.0),) * stages for costs in found]
    hops = tuple((median(there), median(back)) for there, back in map(_columns, _columns(whole)))
    return replace(
        first,
        times={
            kind: tuple(map(median, _columns([costs.times[kind] for costs in found])))
            for kind in kinds
        },
        comm=median(costs.comm for costs in found),
        edges=tuple(
            (*pair, median(costs.edge(*pair) for costs in found))
            for pair in sorted({(a, b) for costs in found for a, b, _ in costs.edges})
        ),
        hops=hops if any(map(any, hops)) else (),
        collectives={
            message: median(costs.collectives.get(message, 0.0) for costs in found)
            for message in first.collectives
        },
        together=median(costs.together for costs in found),
        parts={
            kind: tuple(
                tuple(map(median, _columns(sites)))
                for sites in _columns([costs.parts[kind] for costs in found])
            )
            for kind in kinds
            if all(kind in costs.parts for costs in found)
        },
    )


def _columns(rows: Sequence[Sequence[_Entry]]) -> list[tuple[_Entry, ...]]:
    return list(zip(*rows, strict=True))


def full_rank(placement: Placement, held: Mapping[int, tuple[float, float]]) -> float | None:
    """Return bytes of a microbatch's activation on the fullest rank; None if a stage is unknown.

    `held` has the bytes from F to B, and from B to W, by stage.
    """
    if set(held) != set(range(placement.num_stages)):
        return None
    sums = (
        sum(held[stage][0] for stage, own in enumerate(route) if own == rank)
        for route in placement.routes
        for rank in range(placement.num_ranks)
    )
    return max(sums) or None


def with_bytes(costs: Costs, full: float, held: Mapping[int, tuple[float, float]]) -> Costs:
    """Return `costs` with what stages hold as measured, in activations of `full` bytes."""
    pairs = [held[stage] for stage in range(costs.num_stages)]
    return costs.with_amounts(
        activation=tuple(left / full for left, _ in pairs),
        retained=tuple(waiting / full for _, waiting in pairs),
    )
