"""Passes by name in profiles, and what that costs while there is none."""

import time
import timeit

import torch

from megatron_zbpp.ir import F, Pass
from megatron_zbpp.runtime.clock import HostClock, profiled

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


def test_tracing_costs_less_than_a_percent():
    """Of a pass of one millisecond: what is written down of it, and its range."""
    clock, marks, number = HostClock(), [], 10_000

    def trace():
        start = clock.mark()
        with profiled(PASS):
            pass
        marks.append((start, clock.mark()))

    seconds = min(timeit.repeat(trace, timer=time.process_time, number=number, repeat=5)) / number
    print(f'{seconds * 1e6:.2f} us a pass')
    assert seconds < 0.01 * 1e-3
