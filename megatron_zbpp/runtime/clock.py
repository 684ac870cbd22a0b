"""Times of passes while they run: clocks, records, ranges in profiles, and work that fills waits.

A clock takes marks on the CPU or the GPU, and the memory taken then; a record has the passes of an
iteration with their marks. In profiles `PP:3F1.2` is F of stage 3, microbatch 1, slice 2.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.compat import profiler_enabled


class Clock:
    """Takes marks while passes run; turns them into seconds afterwards."""

    def mark(self) -> Any:
        """Return a point in time, cheap to take; only the clock itself knows what it is."""
        raise NotImplementedError

    def seconds(self, mark: Any) -> float:
        """Return `mark` in seconds of the host's monotonic clock; may synchronise."""
        raise NotImplementedError

    def between(self, start: Any, end: Any) -> float:
        """Return seconds from a mark to a later one; waits until the device has come to that."""
        raise NotImplementedError

    def reached(self, mark: Any) -> bool:
        """Return True once the device has come to `mark`; never waits."""
        return True

    def now(self) -> float:
        """Return seconds of the host's monotonic clock."""
        return time.perf_counter()

    def allocated(self, mark: Any) -> int | None:
        """Return bytes that were allocated when `mark` was taken; None where nobody counts them."""
        return None

    def spare(self) -> int | None:
        """Return bytes that were never needed so far; None where nobody counts them."""
        return None


class HostClock(Clock):
    """A clock for devices whose work is done when the call returns: the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark

    def between(self, start: float, end: float) -> float:
        return end - start


class CudaClock(Clock):
    """CUDA events on the current stream, tied to the host's clock when seconds are first asked for.

    So passes are timed without a synchronisation, and what lies between a mark and the tie is
    short: events tell it in single precision. A mark that the device has not come to by then, as
    where seconds are asked for amid an iteration, has it tied anew.
    """

    def __init__(self) -> None:
        self._tie: tuple[torch.cuda.Event, float] | None = None

    def mark(self) -> torch.cuda.Event:
        return _recorded()

    def seconds(self, mark: torch.cuda.Event) -> float:
        if self._tie is None or not mark.query():
            latest = _recorded()
            latest.synchronize()
            self._tie = latest, self.now()
        event, seconds = self._tie
        return seconds - mark.elapsed_time(event) / 1e3

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def reached(self, mark: torch.cuda.Event) -> bool:
        try:
            return mark.query()
        except RuntimeError:  # a device in error reaches nothing more; the main thread is told
            return False


class CountingClock(CudaClock):
    """A clock whose marks tell what PyTorch has allocated, too; some 10 us of the host each."""

    def mark(self) -> torch.cuda.Event:
        event: Any = _recorded()
        event.allocated = torch.cuda.memory_allocated()
        return event

    def allocated(self, mark: Any) -> int:
        return mark.allocated

    def spare(self) -> int:
        return never_needed()


USABLE = 0.9  # of memory that was never needed: fragments, and what other libraries take


def never_needed() -> int:
    """Return bytes of this process's GPU that were never needed so far."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def clock_for(device: torch.device, counting: bool = False) -> Clock:
    """Return the clock that sees the work of `device`; counts bytes where it can, if `counting`."""
    if device.type != 'cuda':
        return HostClock()
    return CountingClock() if counting else CudaClock()


@dataclass
class Record:
    """The passes of one rank in one iteration, with their times."""

    passes: list[Pass] = field(default_factory=list)  # in order
    # (start, end) of each, for `Clock.seconds`
    marks: list[tuple[object, object]] = field(default_factory=list)
    # activations held after each: of how many stages, microbatches and slices
    live: list[int] = field(default_factory=list)
    # places of passes that ran as one with the next; the time of both is noted at the first
    joined: list[int] = field(default_factory=list)


_NOTHING = nullcontext()  # shared: between profiles, a pass costs no more than asking


def profiled(p: Pass) -> AbstractContextManager:
    """Return a range around `p` while a profiler of torch's is on.

    That is torch.profiler, or emit_nvtx, whose ranges nsys shows: Megatron's --profile runs one.
    """
    if profiler_enabled():
        return torch.profiler.record_function(name(p))
    return _NOTHING


def name(p: Pass) -> str:
    """Return the name of the range."""
    return f'PP:{p}'


class Filler(Protocol):
    """Steps of something else, between passes."""

    def begin(self, clock: Clock, record: Record) -> None:
        """Take note that an iteration begins, whose passes `record` has or will have."""
        ...

    def before(self, p: Pass) -> None:
        """Run steps until `p`, whose input is on its way, is expected to start."""
        ...

    def at_end(self) -> None:
        """Run steps until the last rank is expected to end, when this one has no more to do."""
        ...
