"""One clock for all ranks: round trips bound the error, causality corrects what is left."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp import Costs, build, simulate
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.runtime.measure import RoundTrip, causal, lead, on_one_clock

EPSILON = 1e-9
delays = st.floats(0, 1)
clocks = st.floats(-1e4, 1e4)


@given(st.lists(st.tuples(clocks, delays, delays), min_size=1), clocks)
def test_lead_within_half_of_the_shortest_trip(trips, true):
    """Whatever each way takes: asked at a time, so long there, so long back."""
    found = [
        RoundTrip(asked, asked + there - true, asked + there + back) for asked, there, back in trips
    ]
    shortest = min(trip.answered - trip.asked for trip in found)
    assert abs(lead(found) - true) <= shortest / 2 + EPSILON


@st.composite
def timelines(draw):
    """As they were by one clock."""
    name = draw(st.sampled_from(['1f1b', 'interleaved', 'zb-h1', 'zb-v']))
    ranks = draw(st.integers(2, 5))
    schedule = build(name, ranks, draw(st.integers(1, 3)) * ranks)
    times = [draw(st.floats(0.01, 2)) for _ in range(4)]
    return simulate(schedule, Costs.uniform(schedule.placement, *times))


def shifted(timeline, seconds):
    """Each rank's spans by a clock of its own."""
    spans = [
        tuple((start + by, end + by) for start, end in own)
        for own, by in zip(timeline.spans, seconds, strict=True)
    ]
    return Timeline(timeline.schedule, tuple(spans))


def offsets(each):
    return st.lists(each, min_size=5, max_size=5)


@given(timelines(), offsets(clocks))
def test_known_clocks(timeline, leads):
    ranks = timeline.schedule.num_ranks
    theirs = shifted(timeline, list(accumulate(leads[:ranks])))
    found = on_one_clock(theirs, leads[:ranks])
    for own, true in zip(found.spans, timeline.spans, strict=True):
        for span, expected in zip(own, true, strict=True):
            assert span == pytest.approx(expected, abs=1e-6)


@given(timelines(), offsets(st.floats(-0.5, 0.5)))
def test_no_message_arrives_before_it_was_sent(timeline, errors):
    theirs = shifted(timeline, errors[: timeline.schedule.num_ranks])
    found = causal(theirs)
    assert min(found.lags().values()) > -EPSILON
    moved = [a[0][0] - b[0][0] for a, b in zip(found.spans, theirs.spans, strict=True)]
    assert min(moved) == 0, 'one of the ranks is right as it is'
    assert max(moved) <= max(errors) - min(errors) + EPSILON
    for rank in range(timeline.schedule.num_ranks):
        assert found.busy(rank) == pytest.approx(timeline.busy(rank))


@given(timelines())
def test_one_clock_stays(timeline):
    for own, true in zip(causal(timeline).spans, timeline.spans, strict=True):
        for span, expected in zip(own, true, strict=True):
            assert span == pytest.approx(expected)
