"""The error where no rank can go on, for people: each rank, and the one that it waits for.

That programs end under the rules of a backend is another question: see `analysis.deadlock`.
"""

from __future__ import annotations

from collections.abc import Set

from megatron_zbpp.ir import Pass, Schedule, Together
from megatron_zbpp.ir.errors import ScheduleError


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
