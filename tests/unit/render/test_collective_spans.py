"""Collectives of the pipeline in traces: when they can have run, and no arrows beside them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_zbpp.analysis.collectives import collective_spans
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.render.perfetto import perfetto
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.vocabulary.place import (
    in_embedding_shards,
    in_shards,
    with_shard_times,
)

TIMES = {'hidden': 0.3, 'statistics': 0.1, 'vocabulary': 0.2, 'embedding': 0.4, 'tokens': 0.05}
RANKS, MICROBATCHES, ORIGIN = 2, 4, 5.0


@pytest.fixture(scope='module')
def shards() -> tuple[Timeline, Costs]:
    """ZB-V with both layers on all ranks, which begins at another second than 0."""
    host = build('zb-v', RANKS, MICROBATCHES)
    costs = with_shard_times(Costs.uniform(host.placement), host.placement, 0.2)
    costs = replace(costs, comm=0.25, collectives=TIMES)
    made = simulate(in_embedding_shards(in_shards(host, costs), costs), costs)
    spans = tuple(tuple((a + ORIGIN, b + ORIGIN) for a, b in row) for row in made.spans)
    return replace(made, spans=spans), costs


def exchanged(timeline):
    """Each need that a collective fills, of which pass, and by which."""
    schedule = timeline.schedule
    return [
        (need.message, p, q)
        for _, p in schedule
        for need, q in schedule.needs(p)
        if need.message in schedule.graph.collectives
    ]


@pytest.mark.parametrize('known', [True, False])
def test_spans_lie_between_those_who_make_and_those_who_take(shards, known):
    """They are as long as costs say; where these say nothing, until a pass takes the result."""
    timeline, costs = shards
    found = collective_spans(timeline, costs if known else None)
    by = {(each.message, each.microbatch): each for each in found}
    of, rank_of = timeline.schedule.graph.collectives, timeline.schedule.rank_of
    assert len(found) == len(by) == len(of) * MICROBATCHES and len(of) == 6
    first, last = {}, {}
    for message, p, q in exchanged(timeline):
        span, (start, _), (_, end) = by[message, q.microbatch], *map(timeline.by_pass.get, (p, q))
        assert span.operation == of[message].operation and end <= span.start + 1e-9
        last[span] = max(end, last.get(span, end))
        if span.operation != 'broadcast' or rank_of(p) != rank_of(q):
            assert span.end <= start + 1e-9
            first[span] = min(start, first.get(span, start))
    assert len(first) == len(last) == len(found)
    for span in found:
        before = by.get((of[span.message].after, span.microbatch))
        assert span.start == (before.end if before else last[span])
        if known and span.message in TIMES:
            assert span.end - span.start == pytest.approx(TIMES[span.message])
        elif span.message != 'statistics':
            assert span.end == first[span]


def test_traces_show_them_on_all_ranks(shards):
    timeline, costs = shards
    events = json.loads(perfetto({'zb-v': timeline}, {'zb-v': costs}))['traceEvents']
    begun, ended = ({(e['name'], e['pid']): e for e in events if e['ph'] == p} for p in 'be')
    for span in collective_spans(timeline, costs):
        for rank in range(RANKS):
            name = f'{span.operation} {span.message} {span.microbatch}', rank
            start, end = begun.pop(name), ended.pop(name)
            assert start['id'] == end['id'] and start['cat'] == 'collective'
            assert start['ts'] == pytest.approx((span.start - ORIGIN) * 1e6)
            assert end['ts'] == pytest.approx((span.end - ORIGIN) * 1e6)
    assert not begun and not ended
    assert len({e['id'] for e in events if 'id' in e}) == sum(e['ph'] in 'sb' for e in events)
    told = {(str(q), str(p)) for _, p, q in exchanged(timeline)}
    arrows = {tuple(e['name'].split(' to ')) for e in events if e['ph'] == 's'}
    assert arrows and not arrows & told, 'messages between two ranks alone'


def test_of_slices_each_has_its_own(shards):
    host = build('seq1f1b', RANKS, MICROBATCHES, num_slices=2)
    costs = with_shard_times(Costs.uniform(host.placement), host.placement, 0.2)
    timeline = simulate(in_shards(host, costs), costs)
    events = json.loads(perfetto({'': timeline}))['traceEvents']
    names = {e['name'] for e in events if e['ph'] == 'b'}
    assert len(names) == 3 * MICROBATCHES * 2 and 'broadcast hidden 3.1' in names


def test_without_shards_there_is_none():
    timeline = simulate(build('zb-v', RANKS, MICROBATCHES))
    assert collective_spans(timeline) == []
    events = json.loads(perfetto({'zb-v': timeline}))['traceEvents']
    assert not any(e['ph'] in 'be' for e in events)
