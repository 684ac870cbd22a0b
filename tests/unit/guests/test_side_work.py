"""When steps of a side task run, and when they do not; on a clock that is moved by hand."""

import itertools
import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from megatron_zbpp import Costs, build, simulate
from megatron_zbpp.guests import side_work
from megatron_zbpp.guests.side_work import SideWork
from megatron_zbpp.runtime.clock import Record

RANK = 2  # it waits at the start, inside and at the end
SCHEDULE = build('1f1b', 4, 4)
TIMELINE = simulate(SCHEDULE, Costs.uniform(SCHEDULE.placement))
PASSES, SPANS = SCHEDULE.passes[RANK], TIMELINE.spans[RANK]
PAUSE = 5.0  # between iterations


class Clock:
    """Marks are seconds."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def seconds(self, mark):
        return mark


class Host:
    """One rank whose passes start as simulated, or later where the side task takes too long."""

    def __init__(self, monkeypatch, work):
        monkeypatch.setattr(side_work.dist, 'get_rank', lambda *_: RANK)
        self.clock, self.work, self.late = Clock(), work, 0.0

    def run(self, iterations):
        for _ in range(iterations):
            self.iterate()

    def iterate(self, schedule=SCHEDULE, ahead=0, overlaps=False):
        """One iteration, of which so many passes ran before it began, a second ahead of the rest;
        where it overlaps, the rank does not wait for others behind it."""
        clock, record = self.clock, Record()
        began = clock.time
        for p, (start, end) in zip(PASSES[:ahead], SPANS, strict=False):
            record.passes.append(p)
            record.marks.append((began + start, began + end))
            clock.time = began + end
        began += bool(ahead)
        self.work.begin(clock, record)
        for p, (start, end) in list(zip(PASSES, SPANS, strict=True))[ahead:]:
            self.work.before(p)
            self.late = max(self.late, clock.time - began - start - self.late)
            clock.time = max(clock.time, began + start + self.late)
            mark = clock.time
            clock.time += end - start
            record.passes.append(p)
            record.marks.append((mark, clock.time))
        if not overlaps:
            self.work.at_end()
        spans = tuple(record.marks)
        own = [tuple((a + began, b + began) for a, b in rank) for rank in TIMELINE.spans]
        own[RANK] = spans
        iteration = SimpleNamespace(
            schedule=schedule,
            pp_group=None,
            record=record,
            spans=lambda: spans,
            gather=lambda: SimpleNamespace(timeline=SimpleNamespace(spans=tuple(own))),
        )
        clock.time = max(clock.time, began + TIMELINE.makespan)
        self.work.after(iteration, overlaps)
        clock.time += PAUSE


def host(monkeypatch, takes=0.25, says=0.25, returns=None, margin=0.01):
    """A rank with a task of which a step takes so many seconds, and is said to take others."""
    said = []

    def step():
        made.clock.time += takes
        return returns

    made = Host(monkeypatch, SideWork(step, says, margin, say=said.append))
    made.said = said
    return made


WAITS = TIMELINE.makespan - sum(end - start for start, end in SPANS)


def test_all_gaps_are_used_and_nothing_is_late(monkeypatch):
    made = host(monkeypatch)
    made.run(5)
    assert made.work.steps == 0, 'the first ones are measured'
    made.iterate()
    before = made.work.seconds
    made.iterate()
    assert made.late < 1e-9
    assert 0.8 * WAITS < made.work.seconds - before <= WAITS
    assert made.work.overruns == 0


@pytest.mark.parametrize(
    ('task', 'iterations', 'steps', 'overruns'),
    [
        ({'takes': 0.3}, 7, 4, 4),  # after two that are too long an iteration has no more
        ({'says': 100.0}, 8, 0, 0),  # it never fits
        ({'returns': False}, 8, 1, 0),  # its work has come to an end
    ],
)
def test_when_steps_end(monkeypatch, task, iterations, steps, overruns):
    made = host(monkeypatch, **task)
    made.run(iterations)
    assert (made.work.steps, made.work.overruns) == (steps, overruns)
    assert made.work.finished == ('returns' in task)


def test_stopping(monkeypatch):
    made = host(monkeypatch)
    made.run(6)
    steps = made.work.steps
    made.work.stop()
    made.iterate()
    assert made.work.steps == steps > 0


def test_a_step_that_raises_is_reported_once(monkeypatch):
    made = host(monkeypatch)
    made.work._step = lambda: 1 / 0
    made.run(8)
    (said,) = made.said
    assert 'is not called again' in said and 'ZeroDivisionError' in said


def test_another_schedule_is_measured_first(monkeypatch):
    made = host(monkeypatch)
    made.run(6)
    steps = made.work.steps
    other = build('1f1b', 4, 4)
    for _ in range(4):
        made.iterate(other)
        if made.work._expected is None:
            steps = made.work.steps
    assert made.work._expected is not None
    made.iterate(other)
    assert made.work.steps > steps
    monkeypatch.setattr(side_work, '_AGAIN', 8)
    made = host(monkeypatch)
    found = []
    for _ in range(16):
        before = made.work.steps
        made.iterate()
        found.append(made.work.steps > before)
    assert found[5] and not all(found[6:]) and found[-1]


def test_iterations_that_overlap(monkeypatch):
    """They are measured anew, three apart; steps run before passes that have not run ahead only."""
    made = host(monkeypatch)
    made.run(6)
    steps = made.work.steps
    assert steps > 0
    made.iterate(overlaps=True)  # nothing has run ahead of the first
    for _ in range(9):
        steps = made.work.steps
        made.iterate(ahead=1, overlaps=True)
        if made.work._expected is None:
            assert made.work.steps == steps, 'times are not known'
    assert made.work._expected is not None and made.work._expected.ahead == 1
    before = made.work.seconds
    made.iterate(ahead=1, overlaps=True)
    used = made.work.seconds - before
    inside = [b[0] - a[1] for a, b in itertools.pairwise(SPANS[1:])]
    waits = 1 + sum(inside)  # the second for the first pass that is left
    assert 0.6 * waits < used <= waits
    assert made.late < 1e-9 and made.work.overruns == 0
    steps = made.work.steps
    made.iterate(overlaps=True)  # forwards were dropped: not as it was measured
    assert made.work.steps == steps


def test_a_rank_without_work_measures(monkeypatch):
    made = Host(monkeypatch, SideWork(None, 1.0))
    made.run(6)
    assert made.work.steps == 0 and made.work._expected is not None


def test_random_numbers_are_those_without(monkeypatch):
    """Of torch, of Python and of numpy."""

    def drawn():
        return *torch.rand(2).tolist(), random.random(), numpy.random.rand()

    def seeded():
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)

    made = host(monkeypatch)
    seeded()
    expected = drawn()
    seeded()
    made.work._step = lambda: (drawn(), False)[1]
    made.run(6)
    assert made.work.steps == 1
    assert drawn() == expected


@pytest.mark.parametrize('memory', [None, 50])
@pytest.mark.parametrize(('keeps', 'needs'), [(20, 0), (0, 51), (0, 50), (-1, 20)])
def test_memory_on_a_gpu(monkeypatch, memory, keeps, needs):
    """Of 100 bytes that the device has, training needs 44 and keeps 30: 50 is nine tenths of 56.

    A step leaves `keeps` allocated, and needs so many for a while.
    """
    now, most = [30], [44]

    def step():
        most[0] = max(most[0], most[0] + needs if made.work.steps == 1 else 0, now[0] + keeps)
        now[0] += keeps
        made.clock.time += 0.25

    for name, answer in {
        'is_initialized': lambda: True,
        'get_rng_state': lambda: None,
        'mem_get_info': lambda: (60, 100),
        'memory_reserved': lambda: 40,
        'memory_allocated': lambda: now[0],
        'max_memory_allocated': lambda: most[0],
        'current_stream': lambda: SimpleNamespace(synchronize=lambda: None),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    made = host(monkeypatch)
    made.work = SideWork(step, 0.25, 0.01, memory, made.said.append)
    made.run(8)
    if keeps > 0:
        assert made.work.steps == 3 and made.work.finished
    else:
        assert made.work.finished == (needs > 50) and (made.work.steps == 2) == (needs > 50)
    assert len(made.said) == made.work.finished
    assert all('side task has taken' in said for said in made.said)
