"""Versions of the weights by the order of passes: which one each forward uses, copies, delays."""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum
from typing import NamedTuple

from megatron_zbpp.analysis.weight_versions import weight_versions
from megatron_zbpp.ir import B, F, Graph, Pass, Schedule
from megatron_zbpp.techniques.updates.graph import CORRECTED, STASHED, updating


class Updates(NamedTuple):
    """The arguments of `updating` of a graph."""

    every: int
    everywhere: bool = False
    delays: tuple[int, ...] = ()
    backward: str = STASHED


class Delay(NamedTuple):
    """Age of the weights of the forwards of a batch, in steps."""

    least: int
    mean: float
    most: int


def updates_of(graph: Graph) -> Updates | None:
    """Return how the graph updates weights; None: it does not within an iteration."""
    steps = [each for each in graph.techniques if each.name == updating.__name__]
    return Updates(*steps[-1].arguments) if steps else None  # type: ignore[arg-type]


def forward_versions(schedule: Schedule) -> dict[Pass, int]:
    """Return for each forward the version of its stage's weights that it uses; 0: the initial."""
    updates, newest = _require(schedule), weight_versions(schedule)
    forwards = (p for _, p in schedule if p.kind == F)
    if not updates.delays:
        return {p: newest[p] for p in forwards}
    every, delays = updates.every, updates.delays
    return {p: max(p.microbatch // every - delays[p.stage], 0) for p in forwards}


def delays(schedule: Schedule) -> tuple[Delay, ...]:
    """Return by stage how many steps old the weights are that the forwards of the last batch use.

    The gradient of batch b makes version b+1 of version b, so a forward of batch b that uses
    version b has no delay.
    """
    every = _require(schedule).every
    last = schedule.num_microbatches // every - 1
    ages: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    for p, version in forward_versions(schedule).items():
        if p.microbatch // every == last:
            ages[p.stage].append(last - version)
    return tuple(Delay(min(own), fsum(own) / len(own), max(own)) for own in ages)


def copies(schedule: Schedule) -> tuple[int, ...]:
    """Return by stage how many copies of its weights there are at most, beside fp32 main ones."""
    backward, late = _require(schedule).backward, delays(schedule)
    uses = forward_versions(schedule)
    return tuple(
        max(map(len, _alive(schedule, uses, stage)))
        + (backward == CORRECTED and late[stage].most > 0)
        for stage in range(schedule.num_stages)
    )


def _alive(schedule: Schedule, uses: dict[Pass, int], stage: int) -> Iterator[set[int]]:
    """Yield the versions of a stage's weights that a later pass uses, behind each of its passes."""
    updates, newest = _require(schedule), 0
    graph, rank = schedule.graph, schedule.placement.only_route[stage]
    own = [p for p in schedule.passes[rank] if p.stage == stage]
    coming = [uses[p] for p in own if p.kind == F][::-1]
    flying: dict[tuple[int, int], int] = {}  # by microbatch and slice between F and B
    for p in own:
        newest += graph.kinds[p.kind].of_weights
        if p.kind == F:
            flying[p.microbatch, p.slice] = coming.pop()
        elif any(task.kind == B for task in graph.tasks(*p[:2])):
            del flying[p.microbatch, p.slice]
        stashed = flying.values() if updates.backward == STASHED else ()
        oldest = coming[-1] if updates.delays and coming else newest
        yield {*stashed, *range(oldest, newest + 1)}


def _require(schedule: Schedule) -> Updates:
    updates = updates_of(schedule.graph)
    if updates is None:
        raise ValueError(
            f'{schedule.name} has no updates of the weights: take an asynchronous schedule, such '
            'as pipedream'
        )
    return updates
