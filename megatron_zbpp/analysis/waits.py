"""Waits of ranks: the critical path, gaps in a timeline, and the error where no rank can go on."""

from __future__ import annotations

from collections.abc import Set
from operator import itemgetter
from typing import NamedTuple

from megatron_zbpp.ir import Pass, Schedule, Together
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.grid import ScheduleError
from megatron_zbpp.ir.timeline import Timeline


class Step(NamedTuple):
    """One pass of a critical path, and what it waited for."""

    rank: int  # where it ran
    ran: Pass  # the pass
    start: float  # of the pass
    end: float  # of the pass
    # `start` for nothing, `rank` for the pass before it on its rank, `dependency` for a pass that
    # it needs, `communication` for a message that took `costs.edge`
    waited: str
    on: Pass | None  # that pass, which is the step before; None at the start


def critical_path(timeline: Timeline, costs: Costs) -> tuple[Step, ...]:
    """Return the passes that set the makespan, first to last, each with what it waited for.

    In a simulated timeline each step starts when the one before ends, plus `costs.travel` where it
    waited for communication. In a measured one, what gaps remain is time that costs do not explain.
    """
    schedule = timeline.schedule
    spans: dict[Pass, tuple[float, float]] = {}
    previous: dict[Pass, Pass] = {}
    for order, times in zip(schedule.passes, timeline.spans, strict=True):
        spans.update(zip(order, times, strict=True))
        previous.update(zip(order[1:], order[:-1], strict=True))
    ran = max(spans, key=lambda p: spans[p][1], default=None)
    steps: list[Step] = []
    while ran is not None:
        waited, on = _cause(ran, schedule, costs, spans, previous.get(ran))
        rank = schedule.rank_of(ran)
        steps.append(Step(rank, ran, *spans[ran], waited, on))
        ran = on
    return tuple(reversed(steps))


def _cause(
    p: Pass,
    schedule: Schedule,
    costs: Costs,
    spans: dict[Pass, tuple[float, float]],
    previous: Pass | None,
) -> tuple[str, Pass | None]:
    rank_of = schedule.rank_of
    causes = [(spans[previous][1], 'rank', previous)] if previous else []
    for need, q in schedule.needs(p):
        ranks, stages = (rank_of(q), rank_of(p)), (q.stage, p.stage)
        edge = costs.travel(schedule.graph, need.message, ranks, stages) if need.message else 0.0
        waited = 'communication' if edge else 'dependency'
        causes.append((spans[q][1] + edge, waited, q))
    if not causes:
        return 'start', None
    _, waited, on = max(causes, key=itemgetter(0))  # of equals the first: its own rank
    return waited, on


class Gap(NamedTuple):
    """A time in which a rank runs no pass."""

    rank: int  # that waits
    start: float  # of the gap, from the start of the batch
    length: float  # in the unit of the costs
    before: Pass | None  # the pass that ends at its start; None: the batch begins
    after: Pass | None  # the pass that starts at its end; None: the batch ends

    @property
    def where(self) -> str:
        """The part of the batch: 'start', 'inside' or 'end'."""
        return 'start' if self.before is None else 'end' if self.after is None else 'inside'


def gaps(timeline: Timeline, least: float = 0.0) -> list[Gap]:
    """Return the gaps of all ranks longer than `least`, each rank's in order of time.

    Args:
        timeline: simulated or measured.
        least: of no interest are gaps that are no longer.
    """
    spans = [span for own in timeline.spans for span in own]
    start, end = min(span[0] for span in spans), max(span[1] for span in spans)
    found: list[Gap] = []
    for rank, (order, own) in enumerate(zip(timeline.schedule.passes, timeline.spans, strict=True)):
        ran = sorted(zip(own, order, strict=True), key=lambda entry: entry[0])
        clock, before = start, None
        for (begin, done), p in ran:
            found.append(Gap(rank, clock - start, begin - clock, before, p))
            if done >= clock:
                clock, before = done, p
        found.append(Gap(rank, clock - start, end - clock, before, None))
    return [gap for gap in found if gap.length > max(least, 1e-9)]


def stuck(schedule: Schedule, cursors: list[int]) -> ScheduleError:
    """Return the error for ranks stuck at the pass at their cursor; a cycle among them first."""
    done = {p for order, at in zip(schedule.passes, cursors, strict=True) for p in order[:at]}
    waits = {
        rank: _wait(schedule, done, rank, at)
        for rank, (order, at) in enumerate(zip(schedule.passes, cursors, strict=True))
        if at < len(order)
    }
    cycle = _cycle({rank: holder for rank, (holder, _) in waits.items()})
    others = [rank for rank in waits if rank not in cycle]
    parts = [
        title + '; '.join(waits[rank][1] for rank in ranks)
        for title, ranks in (('a cycle: ', cycle), ('stuck: ', others))
        if ranks
    ]
    what = f'deadlock, {"; ".join(parts)}: move an awaited pass to before the one that waits'
    return ScheduleError(what, schedule, [(rank, cursors[rank]) for rank in waits])


def _wait(schedule: Schedule, done: Set[Pass], rank: int, at: int) -> tuple[int, str]:
    """Return the rank that must act before `rank` can go on from `at`, and a sentence about it."""
    graph = schedule.graph
    entry = _entry(schedule, rank, at)
    passes = entry.passes if isinstance(entry, Together) else (entry,)
    own = [(task, p.microbatch) for p in passes for task in graph.tasks(p.kind, p.stage, p.slice)]
    needs = [
        (need.task, graph.occurrence(need, microbatch))
        for task, microbatch in own
        for need in graph.needs[task]
        if (need.task, graph.occurrence(need, microbatch)) not in own and microbatch >= need.back
    ]
    for task, microbatch in reversed(needs):  # what comes from another rank, before what is its own
        awaited = schedule.done_by.get((task, microbatch))
        if awaited in done or (awaited is None and graph.kinds[task.kind].optional):
            continue
        holder = schedule.placement.rank_of(task.stage, microbatch)
        if awaited is None:
            named = Pass(task.kind, task.stage, microbatch, task.slice)
            why = f'{named}, which rank {holder} never runs'
        else:
            why = f'{awaited}, still to come on rank {holder}'
        return holder, f'rank {rank} at {entry} waits for {why}'
    raise AssertionError(f'{entry} on rank {rank} waits for nothing, and does not run')


def _entry(schedule: Schedule, rank: int, at: int) -> Pass | Together:
    for entry in schedule.order(rank):
        at -= len(entry.passes) if isinstance(entry, Together) else 1
        if at < 0:
            return entry
    raise IndexError(at)


def _cycle(waits_for: dict[int, int]) -> list[int]:
    """Return ranks that wait in a circle; [] if one waits for a rank that is not stuck."""
    path: list[int] = []
    rank = next(iter(waits_for))
    while rank in waits_for and rank not in path:
        path.append(rank)
        rank = waits_for[rank]
    return path[path.index(rank) :] if rank in path else []
