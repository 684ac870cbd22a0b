"""When passes start and end, on the CPU's clock or the GPU's."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Clock(Protocol):
    """Takes marks while passes run; turns them into seconds afterwards."""

    def mark(self) -> object:
        """A point in time, cheap to take."""

    def seconds(self, mark: object) -> float:
        """`mark` in seconds of the host's monotonic clock; may synchronise."""

    def reached(self, mark: object) -> bool:
        """Whether the device has come to `mark`; never waits."""


class HostClock:
    """For devices whose work is done when the call returns: the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark

    def reached(self, mark: float) -> bool:
        return True


class CudaClock:
    """CUDA events on the current stream, tied to the host's clock at one synchronised point."""

    def __init__(self) -> None:
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._origin = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._origin + self._base.elapsed_time(mark) / 1e3

    def reached(self, mark: torch.cuda.Event) -> bool:
        try:
            return mark.query()
        except RuntimeError:  # a device in error reaches nothing more; the main thread is told
            return False


def clock_for(device: torch.device) -> Clock:
    """The clock that sees the work of `device`."""
    return CudaClock() if device.type == 'cuda' else HostClock()
