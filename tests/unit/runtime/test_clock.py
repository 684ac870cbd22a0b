"""CUDA's clock on events that are made up."""

from unittest import mock

import pytest
import torch

from megatron_zbpp.runtime import clock

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


@pytest.mark.parametrize('counting', [False, True])
def test_seconds_are_the_hosts(device, counting):
    timing = clock.clock_for(torch.device('cuda'), counting)
    marks = []
    for _ in range(3):
        marks.append((device.now + DEVICE_AHEAD, timing.mark()))
        device.now += 1.0
    assert not device.synchronised, 'a pass waited for the device'
    for expected, mark in marks:
        assert timing.seconds(mark) == pytest.approx(expected)


@pytest.mark.parametrize('counting', [False, True])
def test_seconds_asked_for_amid_an_iteration(device, counting):
    """As before a step of a side task: later marks have seconds, too."""
    timing = clock.clock_for(torch.device('cuda'), counting)
    first = device.now + DEVICE_AHEAD, timing.mark()
    assert timing.seconds(first[1]) == pytest.approx(first[0])
    later = device.now + DEVICE_AHEAD, timing.mark()
    for expected, mark in (later, first):
        assert timing.seconds(mark) == pytest.approx(expected)
    assert device.synchronised == 2, 'once more, for what the device had not come to'


def test_bytes_are_counted_on_demand(device):
    plain, counting = (clock.clock_for(torch.device('cuda'), c) for c in (False, True))
    assert plain.allocated(plain.mark()) is None and plain.spare() is None
    assert counting.allocated(counting.mark()) == 7
    assert counting.spare() == 10 + 60 - 50
    host = clock.clock_for(torch.device('cpu'), counting=True)
    assert host.allocated(host.mark()) is None and host.spare() is None
