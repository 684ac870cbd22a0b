"""Updates of the weights in an iteration: tasks of a graph, and the versions that passes use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import NamedTuple

from megatron_zbpp.ir import B, F, Graph, Pass, Schedule, Task, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import Kind, Need
from megatron_zbpp.ir.techniques import made_of
from megatron_zbpp.ir.timeline import Timeline, idle
from megatron_zbpp.schedules import Family, build

UPDATE, NORM = 'U', 'norm'
STASHED, NEWEST, CORRECTED = 'stashed', 'newest', 'corrected'


def updating(
    graph: Graph,
    every: int = 1,
    everywhere: bool = False,
    delays: Sequence[int] = (),
    backward: str = STASHED,
) -> Graph:
    """Return the graph where U steps a stage's weights after each `every` microbatches' last W.

    The version of the weights that a forward sees (`weight_versions`) is the number of U before it
    on its stage, or what `delays` say: by stage, how many steps old they are. On two routes one of
    two copies would be stepped: `check` refuses that. Where a step needs the gradients of all
    stages, `everywhere`, it is synchronous, with its norm. The weights of a `backward` are
    `stashed`, those of its forward; `newest`; or `corrected`, an estimate of its forward's from the
    newest (PipeMare's T2).
    """
    if every < 1:
        raise ValueError(f'a step every {every} microbatches: give at least 1')
    if delays and (len(delays) != graph.num_stages or min(delays) < 0):
        raise ValueError(
            f'delays {", ".join(map(str, delays))} of {graph.num_stages} stages: give one of each '
            'stage, from 0 up'
        )
    if backward not in (STASHED, NEWEST, CORRECTED):
        raise ValueError(
            f'a backward with weights {backward!r}: give {STASHED}, {NEWEST} or {CORRECTED}'
        )
    needs, holds = dict(graph.needs), dict(graph.holds)
    weights = [task for task in graph.needs if task.kind == W]
    for stage in range(graph.num_stages):
        awaited = weights if everywhere else [task for task in weights if task.stage == stage]
        message = NORM if everywhere else None
        needs[Task(UPDATE, stage)] = tuple(
            Need(task, message if task.stage != stage else None) for task in awaited
        )
        holds[Task(UPDATE, stage)] = ()
    for task in graph.needs if delays else ():
        if task.kind == F:
            seen = Need(Task(UPDATE, task.stage), back=(delays[task.stage] + 1) * every)
            needs[task] = (*needs[task], seen)
    kinds = {UPDATE: Kind('update of the weights', every=every, of_weights=True)}
    more = (tuple(delays), backward) if delays or backward != STASHED else ()
    return made_of(graph, 'updating', (every, everywhere, *more), needs, holds, kinds)


def weight_versions(schedule: Schedule) -> dict[Pass, int]:
    """Return for each pass how many updates of its stage come before it on its rank.

    Passes of one microbatch with different versions have stale weights (PipeDream, arXiv
    1806.03377, section 3.3: a stage keeps a copy of each version until its backward has run).
    """
    versions: dict[Pass, int] = {}
    kinds = schedule.graph.kinds
    for order in schedule.passes:
        updates = Counter[int]()  # by stage
        for p in order:
            versions[p] = updates[p.stage]
            updates[p.stage] += kinds[p.kind].of_weights
    return versions


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


def backwards_use(weights: str, family: Family) -> bool:
    """Return True if backwards of a family have these weights, such as `STASHED`."""
    updates = updates_of(build(family.name, 2, 2).graph)
    return updates is not None and updates.backward == weights


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


@dataclass(frozen=True)
class SteadyState:
    """A call of a schedule once the pipeline is full."""

    num_microbatches: int  # of a call
    period: float  # time of a call
    bubble: float  # share of it in which even the busiest rank idles
    weight_copies: tuple[int, ...]  # by stage, at most
    delays: tuple[Delay, ...]  # by stage, steps


def steady_state(timeline: Timeline) -> SteadyState | None:
    """Return the steady state of a schedule; None: it has no updates, or too few calls."""
    schedule = timeline.schedule
    updates = updates_of(schedule.graph)
    calls = 0 if updates is None else whole_calls(schedule)
    if updates is None or calls < 2:
        return None
    m, ran = updates.every, timeline.by_pass
    # calls by turns short and long, in twos or threes, as lists of what is ready have them
    spread = 6 if calls > 12 else 1

    def stepped(stage: int, call: int) -> float:
        return ran[Pass(UPDATE, stage, (call + 1) * m - 1)][1]

    period = max(
        (stepped(stage, calls - 1) - stepped(stage, calls - 1 - spread)) / spread
        for stage in range(schedule.num_stages)
    )
    work = max(
        fsum(end - start for p in order if p.microbatch < m for start, end in (ran[p],))
        for order in schedule.passes
    )
    return SteadyState(m, period, idle(period, work), copies(schedule), delays(schedule))


def whole_calls(schedule: Schedule) -> int:
    """Return how many calls run all their forwards: not those with which the order ends."""
    last, fewest = schedule.num_microbatches - 1, schedule.num_microbatches
    for order in schedule.passes:
        steps = Counter[int]()  # by stage
        for p in order:
            steps[p.stage] += p.kind == UPDATE
            if p.kind == F and p.microbatch == last:
                fewest = min(fewest, steps[p.stage])
    return fewest


def with_weight_copies(costs: Costs, schedule: Schedule) -> Costs:
    """Return costs whose parameters count all copies of the weights.

    That is where they have the amount `weights`: those of one copy, by stage.
    """
    if updates_of(schedule.graph) is None or 'weights' not in costs.amounts:
        return costs
    more = (
        (number - 1) * one
        for number, one in zip(copies(schedule), costs.amounts['weights'], strict=True)
    )
    parameters = tuple(a + b for a, b in zip(costs.parameters, more, strict=True))
    return replace(costs, parameters=parameters)
