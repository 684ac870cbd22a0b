"""The scene that every picture of a timeline shows: bars in colours, held activations, ticks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from math import floor, log10
from typing import NamedTuple

from megatron_zbpp.analysis.memory import highest, live
from megatron_zbpp.ir import F, Graph, Pass, Schedule
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import MANY
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.render.colours import by_version, colour
from megatron_zbpp.techniques.updates.graph import UPDATE
from megatron_zbpp.techniques.updates.versions import forward_versions, steady_state


class Bar(NamedTuple):
    """One pass as a picture shows it; times count from the timeline's first start."""

    ran: Pass
    start: float
    end: float
    fill: str


def bars(timeline: Timeline) -> list[list[Bar]]:
    """Return the bars of each rank, in time order."""
    shade = _shades(timeline.schedule)
    origin = min((spans[0][0] for spans in timeline.spans if spans), default=0.0)
    fill = functools.cache(colour)
    return [
        [
            Bar(
                p,
                start - origin,
                end - origin,
                fill(p.kind, *shade(p)),
            )
            for p, (start, end) in zip(order, spans, strict=True)
        ]
        for order, spans in zip(timeline.schedule.passes, timeline.spans, strict=True)
    ]


def _shades(schedule: Schedule) -> Callable[[Pass], tuple[int, int]]:
    """Return the shade of a pass, of so many: by its chunk or route, or by its weights' version."""
    placement = schedule.placement
    if not by_version(schedule):
        return lambda p: placement.shade(p.stage, p.microbatch)
    versions = {p[1:3]: version for p, version in forward_versions(schedule).items()}
    return lambda p: (versions.get(p[1:3], 0) % 2, 2)


def steps(row: Iterable[Bar]) -> list[Bar]:
    """Return the updates of the weights that take no time, which pictures show as lines."""
    return [bar for bar in row if bar.ran.kind == UPDATE and bar.start == bar.end]


class Lane(NamedTuple):
    """A row of a picture: what one engine of a rank runs."""

    rank: int  # whose
    label: str  # for people
    places: tuple[int, ...]  # of its passes in the rank's order
    bars: list[Bar]  # of these


def lanes(timeline: Timeline) -> list[Lane]:
    """Return the rows: each rank's passes, and below them its copies where they take time."""
    beside = compiled(timeline.schedule.graph).on_copy_engines
    found: list[Lane] = []
    for rank, row in enumerate(bars(timeline)):
        for label, copies in ((f'rank {rank}', False), ('copies', True)):
            places = tuple(i for i, bar in enumerate(row) if (bar.ran.kind in beside) == copies)
            own = [row[i] for i in places]
            if not copies or any(bar.end > bar.start for bar in own):
                found.append(Lane(rank, label, places, own))
    return found


def first_rows(timeline: Timeline) -> list[int]:
    """Return which row each rank's passes are in."""
    rows = [row.rank for row in lanes(timeline)]
    return [rows.index(rank) for rank in range(timeline.schedule.num_ranks)]


def held(timeline: Timeline, costs: Costs) -> list[list[tuple[float, float]]]:
    """Return, per rank, the steps of its memory curve: (time, activations held from then on).

    An F takes its memory when it starts, and so does what comes back; the others change what is
    held when they end, a pass of several tasks also after the first of them.
    """
    slack = 1e-9 * timeline.makespan
    schedule = timeline.schedule
    return [
        _steps(list(_changes(row, after, most, schedule.graph, costs)), slack)
        for row, after, most in zip(
            bars(timeline), live(schedule, costs), highest(schedule, costs), strict=True
        )
    ]


def _changes(
    row: list[Bar],
    after: tuple[float, ...],
    most: tuple[float, ...],
    graph: Graph,
    costs: Costs,
) -> Iterator[tuple[float, float]]:
    before = latest = 0.0
    starting = {F, *compiled(graph).arriving}
    for bar, amount, high in zip(row, after, most, strict=True):
        if high not in (before, amount):
            first, *others = (costs.time(task) for task in graph.tasks(bar.ran.kind, bar.ran.stage))
            share = first / ((first + sum(others)) or 1.0)
            yield bar.start + share * (bar.end - bar.start), high
        # in the order of the rank, whose copies may run later than what stands behind them
        latest = max(latest, bar.start if bar.ran.kind in starting else bar.end)
        yield latest, amount
        before = amount


def _steps(changes: list[tuple[float, float]], slack: float) -> list[tuple[float, float]]:
    """Return steps; one within `slack` of the one before replaces it: all at once."""
    steps: list[tuple[float, float]] = []
    for time, amount in changes:
        if steps and time - steps[-1][0] <= slack:
            time = steps.pop()[0]
        steps.append((time, amount))
    return steps


def figures(timeline: Timeline) -> str:
    """Return the text above a timeline: its length, and both shares of idle time."""
    steady = steady_state(timeline)
    if steady is not None:
        m, period = steady.num_microbatches, number(steady.period)
        return (
            f'asynchronous, a call of {m} microbatches takes {period}, bubble {steady.bubble:.1%}'
        )
    return (
        f'makespan {number(timeline.makespan)}, idle GPU time {timeline.idle_all_ranks:.1%}, '
        f'bubble {timeline.bubble:.1%}'
    )


def ticks(span: float, most: int) -> list[float]:
    """Return at most about `most` round numbers from 0 to `span`."""
    if span <= 0:
        return [0.0]
    rough = span / max(most, 1)
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(span / step * (1 + 1e-9)) + 1)]


def amount(value: float) -> str:
    """Return an amount of memory for people: in GiB where it is of bytes."""
    return f'{number(value / 2**30, 3)} GiB' if value >= MANY else number(value)


def number(value: float, digits: int = 5) -> str:
    """Return `value` for people: up to `digits` significant digits, no exponent, no end zeros."""
    text = f'{value:.{digits}g}'
    return f'{float(text):.0f}' if 'e+' in text else text
