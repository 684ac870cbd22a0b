"""CUDA's clock on events that are made up, and one clock for all ranks."""

import time
import timeit
from itertools import accumulate
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp import Costs, Pass, build, simulate
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.runtime import clock
from megatron_zbpp.runtime.clock import HostClock, profiled
from megatron_zbpp.runtime.measure import RoundTrip, causal, lead, on_one_clock

DEVICE_AHEAD = 0.25  # seconds that the device needs to come to what the host has asked for


class Device:
    """A GPU whose events happen `DEVICE_AHEAD` after they were recorded; the host's time."""

    def __init__(self):
        self.now = 100.0
        self.synchronised = 0

    def event(self, enable_timing):
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.time = device, None

    def record(self):
        self.time = self.device.now + DEVICE_AHEAD

    def synchronize(self):
        self.device.synchronised += 1
        self.device.now = max(self.device.now, self.time)

    def query(self):
        return self.time <= self.device.now

    def elapsed_time(self, end):
        assert self.query() and end.query(), 'CUDA tells no time of an event that is to come'
        return (end.time - self.time) * 1e3


@pytest.fixture
def device():
    device = Device()
    numbers = {'memory_allocated': 7, 'memory_reserved': 60, 'max_memory_allocated': 50}
    numbers |= {'mem_get_info': (10, 100)}
    answers = {name: lambda value=value: value for name, value in numbers.items()}
    with (
        mock.patch.multiple(torch.cuda, Event=device.event, **answers),
        mock.patch.object(clock.time, 'perf_counter', lambda: device.now),
    ):
        yield device


@pytest.mark.parametrize('amid', [False, True])
@pytest.mark.parametrize('counting', [False, True])
def test_seconds_are_the_hosts(device, counting, amid):
    """Also where some are asked for amid an iteration, as before a step of a side task."""
    timing, marks = clock.clock_for(torch.device('cuda'), counting), []
    for _ in range(3):
        marks.append((device.now + DEVICE_AHEAD, timing.mark()))
        assert device.synchronised == (amid and len(marks) > 1), 'a pass waited for the device'
        if amid and len(marks) == 1:
            assert timing.seconds(marks[0][1]) == pytest.approx(marks[0][0])
        device.now += 0.0 if amid else 1.0
    for expected, mark in marks[::-1]:
        assert timing.seconds(mark) == pytest.approx(expected)
    assert not amid or device.synchronised == 2, 'once more, for what the device had not come to'


def test_bytes_are_counted_on_demand(device):
    plain, counting = (clock.clock_for(torch.device('cuda'), c) for c in (False, True))
    assert plain.allocated(plain.mark()) is None and plain.spare() is None
    assert counting.allocated(counting.mark()) == 7
    assert counting.spare() == 10 + 60 - 50
    host = clock.clock_for(torch.device('cpu'), counting=True)
    assert host.allocated(host.mark()) is None and host.spare() is None


def test_a_trace_costs_little_while_there_is_no_profiler():
    """Of a pass of one millisecond: what is written down of it, and its range."""
    clock, marks, number, p = HostClock(), [], 10_000, Pass('F', 3, 1)

    def trace():
        start = clock.mark()
        with profiled(p):
            pass
        marks.append((start, clock.mark()))

    seconds = min(timeit.repeat(trace, timer=time.process_time, number=number, repeat=5)) / number
    print(f'{seconds * 1e6:.2f} us a pass')
    assert seconds < 0.01 * 1e-3


# ---- One clock for all ranks: round trips bound the error, causality corrects what is left.


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
