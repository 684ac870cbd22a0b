"""Timelines as a trace for ui.perfetto.dev or chrome://tracing.

Each rank is a process: its passes, a counter of live activations, and an arrow from every pass to
the pass on another rank that takes what it made. What goes through a collective of all ranks is a
bar of its own on each of them instead (asynchronous events, which may overlap). Format: Google's
"Trace Event Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count

from megatron_zbpp.analysis.fit_costs import collective_spans
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.render.scene import Bar, bars, held

_MICROSECONDS = 1e6  # the format's unit; a timeline's is taken to be the second
_INSIDE = 1e-3  # of a pass: an arrow starts so long before its end, to be bound to it

_Event = dict[str, object]


def perfetto(timelines: Mapping[str, Timeline], costs: Mapping[str, Costs] | None = None) -> str:
    """Return the trace as JSON; a unit of time becomes a second.

    Each timeline's ranks are processes of their own; where costs are given, live activations are
    counted.
    """
    events: list[_Event] = []
    arrows, first = count(1), 0
    for name, timeline in timelines.items():
        prefix = f'{name} ' if len(timelines) > 1 else ''
        rows = bars(timeline)
        events += _processes(rows, prefix, first)
        events += _passes(rows, timeline, first)
        events += _arrows(rows, timeline, first, arrows)
        events += _collectives(timeline, (costs or {}).get(name), first, arrows)
        if costs and name in costs:
            events += _counters(timeline, costs[name], first)
        first += len(rows)
    return json.dumps({'traceEvents': events, 'displayTimeUnit': 'ms'}, separators=(',', ':'))


def _processes(rows: list[list[Bar]], prefix: str, first: int) -> Iterator[_Event]:
    for rank in range(len(rows)):
        own: dict[str, _Event] = {
            'process_name': {'name': f'{prefix}rank {rank}'},
            'process_sort_index': {'sort_index': first + rank},
            'thread_name': {'name': 'passes'},
        }
        for key, value in own.items():
            yield {'ph': 'M', 'pid': first + rank, 'tid': 0, 'name': key, 'args': value}


def _passes(rows: list[list[Bar]], timeline: Timeline, first: int) -> Iterator[_Event]:
    schedule = timeline.schedule
    chunk_of, cut = schedule.placement.chunk_of, any(p.slice for _, p in schedule)
    for rank, row in enumerate(rows):
        for ran, start, end, _ in row:
            yield {
                'ph': 'X',
                'pid': first + rank,
                'tid': 0,
                'name': str(ran),
                'cat': schedule.graph.kinds[ran.kind].words,
                'ts': start * _MICROSECONDS,
                'dur': (end - start) * _MICROSECONDS,
                'args': {
                    'stage': ran.stage,
                    'chunk': chunk_of(ran.stage),
                    'microbatch': ran.microbatch,
                    **({'slice': ran.slice} if cut else {}),
                },
            }


def _arrows(
    rows: list[list[Bar]], timeline: Timeline, first: int, ids: Iterator[int]
) -> Iterator[_Event]:
    """Yield a start and a finish event for each message between ranks, but for collectives."""
    schedule = timeline.schedule
    apart = schedule.graph.collectives
    where = {bar.ran: (rank, bar) for rank, row in enumerate(rows) for bar in row}
    for taker, (rank, bar) in where.items():
        needs = schedule.needs(taker)
        for maker in dict.fromkeys(q for need, q in needs if need.message not in apart):
            if where[maker][0] == rank:
                continue
            peer, sent = where[maker]
            key = {'cat': 'message', 'name': f'{maker} to {taker}', 'id': next(ids), 'tid': 0}
            leaves = sent.end - _INSIDE * (sent.end - sent.start)
            yield {'ph': 's', 'pid': first + peer, 'ts': leaves * _MICROSECONDS, **key}
            arrives = bar.start * _MICROSECONDS
            yield {'ph': 'f', 'bp': 'e', 'pid': first + rank, 'ts': arrives, **key}


def _collectives(
    timeline: Timeline, costs: Costs | None, first: int, ids: Iterator[int]
) -> Iterator[_Event]:
    """Yield the begin and the end of each collective, on each rank."""
    schedule = timeline.schedule
    if not schedule.graph.collectives:
        return
    origin = min(spans[0][0] for spans in timeline.spans if spans)
    cut = any(p.slice for _, p in schedule)
    for each in collective_spans(timeline, costs):
        unit = f'{each.microbatch}.{each.slice}' if cut else each.microbatch
        named = {'cat': 'collective', 'name': f'{each.operation} {each.message} {unit}'}
        for rank in range(schedule.num_ranks):
            key = {'pid': first + rank, 'tid': 0, 'id': next(ids), **named}
            yield {'ph': 'b', 'ts': (each.start - origin) * _MICROSECONDS, **key}
            yield {'ph': 'e', 'ts': (each.end - origin) * _MICROSECONDS, **key}


def _counters(timeline: Timeline, costs: Costs, first: int) -> Iterator[_Event]:
    for rank, curve in enumerate(held(timeline, costs)):
        for time, amount in [(0.0, 0.0), *curve]:
            yield {
                'ph': 'C',
                'pid': first + rank,
                'name': 'live activations',
                'ts': time * _MICROSECONDS,
                'args': {'held': amount},
            }
