"""The proof that a schedule may run: whatever lacks it is refused, with the place in the grid.

What `check` demands, and why:

- Each task of the graph is done exactly once for each microbatch, on the rank that holds its stage.
  A schedule without anything but F is one for evaluation: forwards only.
- What is optional (a copy to the host and back) is done as a whole or not at all.
- Of one stage, tasks of a kind come in microbatch order, where the kind says so: dropout draws and
  gradients then add up bit for bit as in Megatron's 1F1B. Slices of a sequence come microbatch by
  microbatch: forwards first slice first, backwards last slice first (`Graph.last_slice_first`).
- A pass comes after what it needs, and no ranks wait for each other in a circle.
- The programs that the runtime will issue, messages included, neither deadlock, whatever the
  backend makes wait, nor receive in another order than was sent (`prove`).

Allowed on purpose: a microbatch may be split into B and W on one stage and fused into BW on
another. Both send the gradient of their input when they end; the neighbour sees no difference.
Messages of several stages between the same two ranks may be used in another order than they were
sent: `lower` posts their receives in the order of the sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_zbpp.analysis.deadlock import DeadlockError
from megatron_zbpp.analysis.lowering import gc_paused, lower
from megatron_zbpp.analysis.memory import RESOLUTION, highest
from megatron_zbpp.analysis.program import LATE, Program
from megatron_zbpp.ir import Graph, Need, Pass, Schedule, Task
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.schedule import ScheduleError

__all__ = ['Checked', 'ScheduleError', 'check']


@dataclass(frozen=True, eq=False)
class Checked:
    """A schedule that may run."""

    schedule: Schedule  # as it was checked
    programs: tuple[Program, ...]  # that the runtime issues on each rank, proven


def check(
    schedule: Schedule,
    *,
    memory_limit: float | None = None,
    costs: Costs | None = None,
    receives: str = LATE,
) -> Checked:
    """Return `schedule` with its programs, if it may run: see the module's text.

    Args:
        schedule: any.
        memory_limit: most that a rank may hold, in the unit of `costs.amounts`.
        costs: whose activations and parameters count against the limit. Default: a full rank holds
            1 a microbatch, and no parameters count.
        receives: when the programs post them: one of `posting.RECEIVES`.

    Raises:
        ScheduleError: it may not; the message names what, where and the cure, and shows the grid.
        ValueError: `memory_limit`, `costs` or `receives` makes no sense.
    """
    _check_shape(schedule)
    graph = schedule.graph
    trains = any(p.kind not in graph.evaluated for _, p in schedule)
    wanted = [task for task in graph.needs if trains or task.kind in graph.evaluated]
    costs = costs or Costs.uniform(schedule.placement)
    placement = schedule.placement
    of_rank: list[list[Task]] = [[] for _ in schedule.passes]
    for task in wanted:
        routes = range(len(placement.routes))
        for rank in {placement.on_route(route, task.stage) for route in routes}:
            of_rank[rank].append(task)
    with gc_paused():
        for rank, tasks in enumerate(of_rank):
            _check_rank(schedule, rank, tasks)
        costs.require(placement)
        try:
            programs = lower(schedule, receives)
        except DeadlockError as error:
            raise ScheduleError(str(error), schedule, error.cells) from error
    if memory_limit is not None:
        _check_memory(schedule, memory_limit, costs)
    return Checked(schedule, programs)


def _check_shape(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        raise ScheduleError(
            f'{schedule.num_microbatches} microbatches: a schedule needs at least 1', schedule
        )
    if len(schedule.passes) != schedule.num_ranks:
        raise ScheduleError(
            f'passes of {len(schedule.passes)} ranks on a placement of {schedule.num_ranks}: '
            'give one order per rank',
            schedule,
        )
    for name, kind in schedule.graph.kinds.items():
        if kind.of_weights and not schedule.placement.is_one_way:
            raise ScheduleError(
                f'{name}, {kind.words}, on two routes: it would change the copy on the route of '
                'its microbatch, and the other copy would keep its weights; take a placement of '
                'one route',
                schedule,
            )


class _Done(NamedTuple):
    """A task that a pass does, and how far a rank has come with it."""

    task: Task
    microbatches: Sequence[int]
    done: set[int]
    previous: set[int]
    lead: int


class _Turn(NamedTuple):
    """Effects of the passes of one kind, stage and slice on a rank, and their dependencies."""

    does: tuple[_Done, ...]  # each task
    # each need of its own stage with the microbatches that are done there
    after: tuple[tuple[Need, set[int]], ...]


def _check_rank(schedule: Schedule, rank: int, wanted: Sequence[Task]) -> None:
    """Require each of the rank's tasks once per microbatch, in order, after its dependencies."""
    comes = {task: found for task in wanted if (found := _microbatches(schedule, rank, task))}
    done: dict[Task, set[int]] = {task: set() for task in comes}
    turns = dict(_turns(schedule, comes, done))
    graph = schedule.graph
    unordered = {kind for kind, each in graph.kinds.items() if not each.in_order}
    for at, p in enumerate(schedule.passes[rank]):
        kind, stage, microbatch, part = p
        turn = turns.get((kind, stage, part))
        if turn is None or microbatch not in turn.does[0].microbatches:
            raise _foreign(schedule, rank, at)
        for task, microbatches, before, previous, lead in turn.does:
            if microbatch in before:
                what, first = graph.kinds[task.kind].words, _doer(schedule, rank, task, microbatch)
                raise ScheduleError(
                    f'{p} on rank {rank} repeats the {what} that {first} has done: keep one of '
                    'them',
                    schedule,
                    [(rank, at)],
                )
            if task.kind in unordered:
                continue
            if microbatches[len(before)] != microbatch or len(previous) - len(before) != lead:
                raise _out_of_turn(schedule, rank, at, *_next(graph, task, microbatches, done))
        for need, before in turn.after:
            if microbatch >= need.back and graph.occurrence(need, microbatch) not in before:
                needed = graph.occurrence(need, microbatch)
                optional = graph.kinds[need.task.kind].optional and not graph.kinds[kind].optional
                if not optional or (need.task, needed) in schedule.done_by:
                    raise _too_early(schedule, rank, at, need.task, needed)
        for each in turn.does:
            each.done.add(microbatch)
    for task, microbatches in comes.items():
        required = microbatches
        if graph.kinds[task.kind].optional:  # of those whose other optional tasks are done
            takers = (taker for taker, _ in graph.feeds[task])
            others = (*takers, *(need.task for need in graph.needs[task]))
            moved = (done[each] for each in others if graph.kinds[each.kind].optional)
            required = sorted(set[int]().union(*moved))
        for microbatch in required:
            if microbatch not in done[task]:
                raise _missing(schedule, rank, task, microbatch)


def _turns(
    schedule: Schedule, comes: Mapping[Task, Sequence[int]], done: Mapping[Task, set[int]]
) -> Iterator[tuple[tuple[str, int, int], _Turn]]:
    """Return by kind, stage and slice all that a rank can do."""
    graph = schedule.graph
    optional = {task for task in comes if graph.kinds[task.kind].optional}
    places = {(task.stage, task.slice) for task in comes}
    for kind, (stage, part) in itertools.product(graph.kinds, places):
        tasks = graph.tasks(kind, stage, part)
        if all(task in comes for task in tasks):
            needs = [need for task in tasks for need in graph.needs[task]]
            for need in needs:
                if need.task in optional:
                    needs += graph.needs[need.task]
            own = (need for need in needs if need.task in done and need.task.stage == stage)
            does: list[_Done] = []
            for task in tasks:
                begins, step = _direction(graph, task.kind)
                previous = task._replace(slice=(task.slice - step) % graph.num_slices)
                if previous not in done:  # not each slice has it
                    previous, begins = task, task.slice
                lead = int(task.slice != begins)
                does.append(_Done(task, comes[task], done[task], done[previous], lead))
            after = tuple((need, done[need.task]) for need in own if need.task not in tasks)
            yield (kind, stage, part), _Turn(tuple(does), after)


def _direction(graph: Graph, kind: str) -> tuple[int, int]:
    """Return the slice with which each microbatch begins, and the step to the next one."""
    return (graph.num_slices - 1, -1) if kind in graph.last_slice_first else (0, 1)


def _next(
    graph: Graph, task: Task, microbatches: Sequence[int], done: Mapping[Task, set[int]]
) -> tuple[Task, int]:
    """Return the slice and the microbatch whose turn it is, of the kind and stage of `task`."""
    begins, step = _direction(graph, task.kind)
    slices = [task._replace(slice=begins + step * k) for k in range(graph.num_slices)]
    turn = min((each for each in slices if each in done), key=lambda each: len(done[each]))
    return turn, microbatches[len(done[turn])]


def _microbatches(schedule: Schedule, rank: int, task: Task) -> Sequence[int]:
    """Return the microbatches for which `rank` does `task`, one of its own, in order."""
    m, every = schedule.num_microbatches, schedule.graph.kinds[task.kind].every
    placement = schedule.placement
    if len(placement.routes) == 1:
        return range(every - 1, m, every)
    return [i for i in range(every - 1, m, every) if placement.rank_of(task.stage, i) == rank]


def _foreign(schedule: Schedule, rank: int, at: int) -> ScheduleError:
    p, graph = schedule.passes[rank][at], schedule.graph
    tasks = graph.tasks(*p[:2], p.slice) if p.kind in graph.kinds else ()
    if not tasks:
        why = f'its kind {p.kind!r} is none of {", ".join(graph.kinds)}'
    elif p.stage not in graph.sites:
        why = f'there are stages 0 to {schedule.num_stages - 1} only'
    elif p.slice not in range(graph.num_slices):
        why = f'there are slices 0 to {graph.num_slices - 1} only'
    elif not all(task in graph.needs for task in tasks):
        why = f'stage {p.stage} has no {graph.kinds[p.kind].words}'
    elif p.microbatch not in range(schedule.num_microbatches):
        why = f'there are microbatches 0 to {schedule.num_microbatches - 1} only'
    elif schedule.rank_of(p) != rank:
        why = f'its stage is on rank {schedule.rank_of(p)}'
    else:
        why = f'it comes with every {graph.kinds[p.kind].every}. microbatch only'
    return ScheduleError(f'{p} does not belong on rank {rank}: {why}', schedule, [(rank, at)])


def _out_of_turn(schedule: Schedule, rank: int, at: int, task: Task, turn: int) -> ScheduleError:
    """Return the error for a pass that comes when it is the turn of `task` of another unit."""
    p, what = schedule.passes[rank][at], schedule.graph.kinds[task.kind].words
    slices = ''
    if schedule.graph.num_slices > 1:
        begins = 'last' if task.kind in schedule.graph.last_slice_first else 'first'
        slices = f'{begins} slice first (slice {task.slice} now, not {p.slice}), '
    later = _doer(schedule, rank, task, turn)
    if later is None:
        return _missing(schedule, rank, task, turn, at)
    message = (
        f'{p} on rank {rank} comes before {later}: each {what} of a stage must come in '
        f'microbatch order, {slices}or results differ from 1F1B in the last bits'
    )
    return ScheduleError(message, schedule, [(rank, at)])


def _too_early(
    schedule: Schedule, rank: int, at: int, task: Task, microbatch: int
) -> ScheduleError:
    needed = _doer(schedule, rank, task, microbatch)
    if needed is None:
        return _missing(schedule, rank, task, microbatch, at)
    p = schedule.passes[rank][at]
    what = f'{p} on rank {rank} comes before {needed}, which it needs: move it behind'
    return ScheduleError(what, schedule, [(rank, at)])


def _missing(
    schedule: Schedule, rank: int, task: Task, microbatch: int, at: int | None = None
) -> ScheduleError:
    """Return the error for a task that no pass of its rank does, noticed at cell `at`."""
    graph, order = schedule.graph, schedule.passes[rank]
    found = {p.kind for p in order if p[1:] == (task.stage, microbatch, task.slice)}
    done = {each for kind in found & set(graph.kinds) for each in graph.tasks(kind, task.stage)}
    # a pass that does more is no cure where that is done already
    cures = [
        Pass(kind, task.stage, microbatch, task.slice)
        for kind in graph.doers[task.kind]
        if done.isdisjoint(graph.tasks(kind, task.stage))
    ]
    what = (
        f'rank {rank} never does the {graph.kinds[task.kind].words} of microbatch {microbatch} on '
        f'stage {task.stage}: add {" or ".join(map(str, cures))}'
    )
    return ScheduleError(what, schedule, [(rank, len(order) if at is None else at)])


def _doer(schedule: Schedule, rank: int, task: Task, microbatch: int) -> Pass | None:
    kinds = schedule.graph.doers[task.kind]
    passes = {Pass(kind, task.stage, microbatch, task.slice) for kind in kinds}
    return next((p for p in schedule.passes[rank] if p in passes), None)


def _check_memory(schedule: Schedule, limit: float, costs: Costs) -> None:
    """Require that no rank holds more than `limit` at the end of an F, of a B, or within a BW."""
    if not limit >= 0:
        raise ValueError(f'memory limit {limit} is not an amount: give a number from 0 up')
    unit = type(limit) if isinstance(limit, float) else float  # which tells how it is written
    static = costs.static(schedule.placement)
    for rank, held in enumerate(highest(schedule, costs)):
        room = limit - static[rank] + RESOLUTION
        at = next((i for i, amount in enumerate(held) if amount > room), None)
        if at is not None:
            parameters = f' beside parameters of {unit(static[rank]):g}' if static[rank] else ''
            what = (
                f'rank {rank} holds activations of {unit(held[at]):g}{parameters} at '
                f'{schedule.passes[rank][at]}, {unit(max(held)):g} at its peak, above the limit of '
                f'{limit:g}: raise the limit, or take a schedule that holds less'
            )
            raise ScheduleError(what, schedule, [(rank, at)])


def is_mirrored(schedule: Schedule) -> bool:
    """Check that all ranks that hold the same stages run the same passes, microbatches apart.

    Then collectives between the copies of a stage, in passes or when its gradients are complete,
    come in one order on all their ranks. Where each stage is on one rank, there are none.
    """
    found: dict[tuple[int, ...], list[tuple[str, int, int]]] = {}
    for rank, order in enumerate(schedule.passes):
        own = [(p.kind, p.stage, p.slice) for p in order]
        if found.setdefault(schedule.placement.stages(rank), own) != own:
            return False
    return True
