"""Schedules beside each other on several partitions and latencies: where the ranking flips."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from megatron_zbpp.analysis.gain import RIVAL
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.bounds import Bounds
from megatron_zbpp.partitioning.layers import Devices, Layers
from megatron_zbpp.partitioning.search import climb, moved_layers, named_schedule
from megatron_zbpp.partitioning.space import Partition, Space, parameters_held, stage_costs
from megatron_zbpp.planner.limits import Limit
from megatron_zbpp.schedules import build, find

EVEN, BEST = PARTITIONS = 'even', 'best'
_MOST_SIMULATED = 200  # partitions, to find the best one


class Row(NamedTuple):
    """One schedule on one partition at one latency; a row of the CSV."""

    schedule: str  # its name
    partition: str  # 'even' as Megatron divides, or 'best', the best found for that schedule
    layout: str  # of the partition
    latency: float  # of a message between two ranks, beside what the devices' links take
    makespan: float  # simulated
    window: float  # the same
    gain: float  # time saved against 1F1B on the even partition at that latency
    bubble: float  # share of the longest window in which even the busiest rank idles
    peak: float  # most activations of a rank, in the unit of the layers
    memory: float  # most of a rank, parameters included
    fits: bool  # True if each rank stays within its memory


def compared(
    layers: Layers,
    devices: Devices,
    num_microbatches: int,
    names: Iterable[str],
    latencies: Sequence[float],
    partitions: Sequence[str] = PARTITIONS,
    memory_limit: Limit = None,
) -> Iterator[Row]:
    """Yield a row for each schedule that can be built, each partition and each latency.

    Rank r is device r. `memory_limit` limits what a rank may hold, parameters included, beside the
    memory of the devices.
    """
    schedules, _ = comparable(names, layers, len(devices), num_microbatches)
    for latency in latencies:
        slow = with_latency(devices, latency)
        loop = Space(layers, slow, num_microbatches, [Placement.loop(len(devices))])
        rival = simulate(*_Held.of(loop, loop.even(), RIVAL)[:2]).makespan
        for name, schedule in schedules.items():
            space = Space(
                layers, slow, num_microbatches, [schedule.placement], memory_limit, keep_order=True
            )
            even = space.even(schedule.placement)
            known = {even: _Held.of(space, even, name)}
            for kind in partitions:
                where = even if kind == EVEN else best_for(space, known, name)
                found = known.get(where) or _Held.of(space, where, name)
                timeline = simulate(found.schedule, found.costs)
                parameters = parameters_held(layers, where)
                yield Row(
                    name,
                    kind,
                    layers.text(where.cuts),
                    latency,
                    timeline.makespan,
                    max(timeline.windows),
                    1 - timeline.makespan / rival if rival else 0.0,
                    timeline.bubble,
                    max(found.peaks),
                    max(map(sum, zip(found.peaks, parameters, strict=True))),
                    min(found.room) >= 0,
                )


def with_latency(devices: Devices, latency: float) -> Devices:
    """Return the devices with that much more between any two of them."""
    ranks = range(len(devices))
    rows = devices.latency or tuple((0.0,) * len(devices) for _ in ranks)
    more = tuple(tuple(rows[a][b] + (latency if a != b else 0.0) for b in ranks) for a in ranks)
    return replace(devices, latency=more)


def best_for(space: Space, known: Mapping[Partition, _Held], name: str) -> Partition:
    """Return the best partition found for one named schedule.

    It is searched from the even one, from stages of about equal time, and from those of the bound;
    where none of them keeps the memory, from partitions near them that do.
    """
    bounds, left = Bounds(space), count(_MOST_SIMULATED - 1, -1)

    def go_on(_: object) -> bool:
        return next(left) > 0

    (even,) = known
    starts = [even, space.balanced(even.placement, even.order)]
    if even.placement.num_chunks == 1:
        starts.append(replace(even, cuts=bounds.chain()[1]))
    starts = list(dict.fromkeys(starts))
    found = [climb(space, bounds, start, (name,), go_on) for start in starts]
    if not any(found):
        near = (_within(space, x, known.get(x) or _Held.of(space, x, name), name) for x in starts)
        found = [climb(space, bounds, x, (name,), go_on) for x in near if x is not None]
    best = min((x for x in found if x is not None), key=lambda x: x.value, default=None)
    return even if best is None else best.partition


def _within(space: Space, where: Partition, held: _Held, name: str) -> Partition | None:
    """Return a partition near another, on which each rank stays within its memory; None: none."""
    room = held.room
    while min(room) < 0:
        near = ((_Held.of(space, x, name).room, x) for x in moved_layers(space, where, room))
        better = next((step for step in near if sorted(step[0]) > sorted(room)), None)
        if better is None:
            return None
        room, where = better
    return where


def comparable(
    names: Iterable[str], layers: Layers, num_ranks: int, m: int
) -> tuple[dict[str, Schedule], dict[str, str]]:
    """Return schedules with their usual chunks, and why the others cannot be compared."""
    found: dict[str, Schedule] = {}
    skipped: dict[str, str] = {}
    stages = len(layers.splits()) + 1
    for name in names:
        family = find(name)
        try:
            schedule = build(name, num_ranks, m)
        except ValueError as error:
            skipped[name] = str(error).partition('\n')[0]
            continue
        if not schedule.placement.is_one_way:
            skipped[name] = 'it runs both ways: a partition is for one'
        elif family.moves:
            skipped[name] = 'it copies activations, and a file of layers has no times of copies'
        elif schedule.num_stages > stages:
            skipped[name] = (
                f'it has {schedule.num_stages} stages, and the layers make {stages} at most: give '
                'fewer ranks'
            )
        else:
            found[name] = schedule
    return found, skipped


class _Held(NamedTuple):
    """A named schedule on a partition."""

    schedule: Schedule  # it, within the memory where it adapts to that
    costs: Costs  # of the stages
    peaks: tuple[float, ...]  # most activations of each rank
    room: tuple[float, ...]  # memory that each rank has left then; below 0: that it lacks

    @classmethod
    def of(cls, space: Space, where: Partition, name: str) -> _Held:
        costs = stage_costs(space.layers, space.devices, where)
        problem, ranks, m = space.problem(where), len(space.devices), space.num_microbatches
        schedule = None if problem is None else named_schedule(name, problem)
        if schedule is None:
            adapts = 'costs' in find(name).options
            schedule = build(name, ranks, m, costs=costs if adapts else None)
        peaks = tuple(peak(schedule, costs))
        pairs = zip(peaks, space.memory_limits(where), strict=True)
        room = (most * (1 + 1e-9) - own for own, most in pairs)
        return cls(schedule, costs, peaks, tuple(room))


def winners(rows: Iterable[Row]) -> dict[tuple[str, float], Row]:
    """Return the shortest row of each partition and latency."""
    found: dict[tuple[str, float], Row] = {}
    for row in rows:
        key = row.partition, row.latency
        if key not in found or row.makespan < found[key].makespan - 1e-9:
            found[key] = row
    return found
