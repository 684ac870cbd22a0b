"""Side work in the time in which a rank waits: FreeRide (arXiv 2409.06941), in this process.

Some iterations are measured without it. They tell when each pass of this rank starts, and when the
last rank ends. From then on, before a pass whose input has not come, and behind the last one, steps
run for as long as a step and a margin fit before what was measured.

Where iterations overlap, as those of optimizer steps that are validated later, a rank does not wait
for the last one, and its first forwards have run before an iteration begins: there is nothing to do
at its end, and times count from the first pass that is left.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_zbpp.guests.base import Guest, Run
from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.runtime.clock import USABLE, Clock, Filler, Record, never_needed
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.measure import Iteration


def on_cuda() -> bool:
    """Return True if this process computes on a GPU."""
    return torch.cuda.is_initialized()


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore random states of Python, numpy, and torch's host and device after the block.

    What Megatron keeps in states of its own is for who knows Megatron to put back.
    """
    numpy = sys.modules.get('numpy')
    own, host = random.getstate(), torch.get_rng_state()
    numbers = None if numpy is None else numpy.random.get_state()
    device = torch.cuda.get_rng_state() if on_cuda() else None
    try:
        yield
    finally:
        random.setstate(own)
        torch.set_rng_state(host)
        if numpy is not None:
            numpy.random.set_state(numbers)
        if device is not None:
            torch.cuda.set_rng_state(device)


class MemoryBudget:
    """Bytes of the device that steps may take; counted on a GPU only.

    None: of what was never needed before the first step, the usable share.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.held = 0  # by what steps have left allocated
        self.peak = 0  # the most that a step went beyond what was ever allocated before it

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the bytes that are allocated within."""
        if not on_cuda():
            yield
            return
        if self.most is None:
            self.most = int(USABLE * never_needed())
        before, highest = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        try:
            yield
        finally:
            self.held += torch.cuda.memory_allocated() - before
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - highest)

    def __str__(self) -> str:
        most = 0 if self.most is None else self.most
        return f'{max(self.held, self.peak) / 2**20:.0f} MiB of {most / 2**20:.0f} MiB'


_WARM_UP = 2  # iterations that are slower than others
_MEASURED = 3
_APART = 3  # iterations between those measured that overlap: measuring is a barrier
_AGAIN = 200  # iterations after which times are measured anew
_IN_A_ROW = 2  # steps too long, after which an iteration has no more
_SHARE, _LEAST = 0.2, 1e-3  # margin: of a step, and seconds


@dataclass(frozen=True)
class _Times:
    """Times at which a rank runs its passes, in seconds."""

    ahead: int  # passes that had run before the iteration began; the first is the one after them
    starts: dict[Pass, float]  # of each pass, after the start of the first
    gaps: dict[Pass, float]  # before each pass, in which the rank waits
    end: float  # of the last rank, after the start of the first pass here
    end_gap: float  # from the end of the last pass here to that
    after_begin: float  # the start of the first pass, after the iteration began here
    after_end: float  # the same after the end of the iteration before

    @classmethod
    def middle(cls, found: Sequence[_Times]) -> _Times:
        first = found[-1]
        found = [each for each in found if each.starts.keys() == first.starts.keys()]
        return cls(
            first.ahead,
            {p: median(each.starts[p] for each in found) for p in first.starts},
            {p: median(each.gaps[p] for each in found) for p in first.gaps},
            *(
                median(getattr(each, name) for each in found)
                for name in ('end', 'end_gap', 'after_begin', 'after_end')
            ),
        )


class SideWork(Filler):
    """Steps of a side task on one rank. All ranks of the pipeline have one, or none has."""

    def __init__(
        self,
        # called without arguments; returns False when there is no more to do. None: this rank has
        # nothing to do, and only takes part in measuring
        step: Callable[[], object] | None,
        step_seconds: float,  # that a step takes
        margin: float | None = None,  # that must be left beside a step; None: a fifth and 1 ms
        memory: int | None = None,  # bytes of the device; None: what was never needed so far
        say: Callable[[str], None] = rank_log.warning,  # tells the user
    ) -> None:
        self.steps, self.seconds = 0, 0.0  # that have run, and that they took
        self.overruns = 0  # steps that took longer than `step_seconds` and the margin
        # whether it returned False, failed, took too much memory, or was stopped
        self.finished = step is None
        self._step = step
        self._long = step_seconds + (_LEAST + _SHARE * step_seconds if margin is None else margin)
        self._memory = MemoryBudget(memory)
        self._say = say
        self._kind: tuple[Schedule, bool] | None = None  # of iterations: what was measured
        self._seen = 0
        self._found: list[_Times] = []
        self._expected: _Times | None = None
        # of the iteration that runs
        self._clock: Clock | None = None
        self._record: Record | None = None
        self._began = 0.0
        self._ahead = 0
        self._row = 0
        self._last_end: float | None = None  # of the iteration before

    def stop(self) -> None:
        """Run no more steps."""
        self.finished = True

    @property
    def active(self) -> bool:
        """True while steps run in this iteration."""
        expected = self._expected
        as_measured = expected is not None and expected.ahead == self._ahead
        return not self.finished and as_measured and self._row < _IN_A_ROW

    def begin(self, clock: Clock, record: Record) -> None:
        self._clock, self._record, self._began, self._row = clock, record, clock.now(), 0
        self._ahead = len(record.passes)

    def before(self, p: Pass) -> None:
        expected = self._expected
        if expected is None or not self.active or expected.gaps.get(p, 0.0) <= self._long:
            return
        first = self._first_start()
        if first is not None:
            until = first + expected.starts[p]
        else:
            until = self._began + expected.after_begin
            if self._last_end is not None:
                until = min(until, self._last_end + expected.after_end)
        self._run(until)

    def at_end(self) -> None:
        expected = self._expected
        if expected is not None and self.active and expected.end_gap > self._long:
            first = self._first_start()
            if first is not None:
                self._run(first + expected.end)

    def _first_start(self) -> float | None:
        """Wait for the device; return when the first pass that is left began; None: it has not."""
        assert self._clock is not None and self._record is not None
        _wait_for_device()
        marks = self._record.marks[self._ahead :]
        return self._clock.seconds(marks[0][0]) if marks else None

    def after(self, iteration: Iteration, overlaps: bool = False) -> None:
        """Handle the end of an iteration: a collective of its pipeline while measuring."""
        last = self._kind
        known = last is not None and last[0] is iteration.schedule and last[1] == overlaps
        if not known or self._seen >= _AGAIN:
            self._kind, self._seen = (iteration.schedule, overlaps), _WARM_UP - 1 if last else 0
            self._found, self._expected = [], None
        self._seen += 1
        spans = iteration.spans()
        due = self._seen > _WARM_UP and not (overlaps and self._seen % _APART)
        if due and self._expected is None:
            self._found.append(self._times(iteration, spans))
            if len(self._found) == _MEASURED:
                self._expected = _Times.middle(self._found)
        self._last_end = spans[-1][1] if spans else None

    def _times(self, iteration: Iteration, spans: tuple[tuple[float, float], ...]) -> _Times:
        timeline = iteration.gather().timeline
        ahead = self._ahead
        own = timeline.spans[dist.get_rank(iteration.pp_group)][ahead:]
        last = max(end for rank in timeline.spans for _, end in rank)
        first = own[0][0]
        passes, spans = iteration.record.passes[ahead:], spans[ahead:]
        starts = {p: start - first for p, (start, _) in zip(passes, own, strict=True)}
        after_begin = spans[0][0] - self._began
        after_end = after_begin if self._last_end is None else spans[0][0] - self._last_end
        gaps = {passes[0]: after_begin}
        for (_, end), p, (start, _) in zip(own, passes[1:], own[1:], strict=False):
            gaps[p] = start - end
        return _Times(ahead, starts, gaps, last - first, last - own[-1][1], after_begin, after_end)

    def _run(self, until: float) -> None:
        """Run steps while one and the margin end before `until`."""
        clock = self._clock
        assert clock is not None and self._step is not None
        while self.active and clock.now() + self._long < until:
            started = clock.now()
            with kept_random_states(), self._memory.counting():
                try:
                    goes_on = self._step() is not False
                except Exception:
                    self._say(
                        f'side task failed and is not called again:\n{traceback.format_exc()}'
                    )
                    goes_on = False
                _wait_for_device()
            taken = clock.now() - started
            self.steps += 1
            self.seconds += taken
            late = taken > self._long
            self.overruns += late
            self._row = self._row + 1 if late else 0
            memory = self._memory
            if goes_on and memory.most is not None and max(memory.held, memory.peak) > memory.most:
                self._say(
                    f'side task has taken {memory} that it may, and is not called again: '
                    'let it keep less, or give memory, in bytes'
                )
                goes_on = False
            if not goes_on:
                self.finished = True


def _wait_for_device() -> None:
    if on_cuda():
        torch.cuda.current_stream().synchronize()


class SideTask(Guest):
    """Tells `work` the measured times at which passes are expected."""

    def __init__(self, work: SideWork) -> None:
        self.filler = work
        self._work = work

    def after(self, iteration: Iteration, run: Run) -> None:
        with run.collective('times of the pipeline for a side task'):
            self._work.after(iteration, run.overlaps)


def forwards(
    layers: Sequence[Callable[[Any], Any]], inputs: Iterable[Any], take: Callable[[Any], None]
) -> Callable[[], bool]:
    """Return a step that runs one layer of a model that does not train.

    Args:
        layers: of the model, in order: each takes what the one before returned.
        inputs: of the first layer; the next one is asked for once the last one has come out.
        take: is called with what comes out, in the order of the inputs.

    Returns:
        For `plugin.side_task`: it returns False once there are no more inputs.

    >>> found = []
    >>> step = forwards([lambda x: x + 1, lambda x: 2 * x], [1, 2], found.append)
    >>> [step() for _ in range(5)], found
    ([True, True, True, True, False], [4, 6])
    """

    def steps() -> Iterator[bool]:
        for made in inputs:
            for number, layer in enumerate(layers, 1):
                with torch.no_grad():
                    made = layer(made)
                if number == len(layers):
                    take(made)
                yield True

    run = steps()
    return lambda: next(run, False)
