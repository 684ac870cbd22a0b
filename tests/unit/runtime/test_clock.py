"""CUDA's clock on events that are made up."""

import time
import timeit
from unittest import mock

import pytest
import torch

from megatron_zbpp import Pass
from megatron_zbpp.ir import F
from megatron_zbpp.runtime import clock
from megatron_zbpp.runtime.clock import HostClock, profiled

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
    with (
        mock.patch.object(torch.cuda, 'Event', device.event),
        mock.patch.object(clock.time, 'perf_counter', lambda: device.now),
        mock.patch.object(torch.cuda, 'memory_allocated', lambda: 7),
        mock.patch.object(torch.cuda, 'mem_get_info', lambda: (10, 100)),
        mock.patch.object(torch.cuda, 'memory_reserved', lambda: 60),
        mock.patch.object(torch.cuda, 'max_memory_allocated', lambda: 50),
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


# ---- Passes by name in profiles, and what that costs while there is none.


PASS = Pass(F, 3, 1)


def test_named_while_a_profiler_is_on():
    with profiled(PASS):
        torch.ones(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for p in (PASS, Pass('BW', 0, 12)):
            with profiled(p):
                torch.ones(1)
    names = [event.name for event in profile.events() if event.name.startswith('PP:')]
    assert names == ['PP:3F1', 'PP:0BW12']
    # of a pass of one millisecond: what is written down of it, and its range
    clock, marks, number = HostClock(), [], 10_000

    def trace():
        start = clock.mark()
        with profiled(PASS):
            pass
        marks.append((start, clock.mark()))

    seconds = min(timeit.repeat(trace, timer=time.process_time, number=number, repeat=5)) / number
    print(f'{seconds * 1e6:.2f} us a pass')
    assert seconds < 0.01 * 1e-3
