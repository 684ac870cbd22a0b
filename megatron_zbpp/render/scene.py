"""The scene that every picture of a timeline shows: bars in colours, held activations, ticks.

Colours of passes are told apart by every kind of colour vision, the chunk by its shade. Without
colours, stripes at the foot of a bar tell F (none), B (one), W (two) and BW (three). Blue, orange,
green and purple, also unlike in lightness: any two of them are more than 20 apart in CIE Lab for
people who lack the red, the green or the blue cones (tests/unit/render/test_render.py).
"""

from __future__ import annotations

import colorsys
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import floor, log10
from typing import NamedTuple

from megatron_zbpp.analysis.memory import highest, live
from megatron_zbpp.ir import BW, B, F, Graph, Kind, Pass, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import MANY
from megatron_zbpp.ir.graph import compiled
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.techniques.updates.versions import (
    UPDATE,
    forward_versions,
    steady_state,
    updates_of,
)

HUES = {F: '#1f4fd8', B: '#f28e1c', W: '#35b48f', BW: '#70166f'}
STRIPES = {F: 0, B: 1, W: 2, BW: 3}
_GOLDEN = 0.61803398875  # of the circle of hues, from one kind without a hue of its own to the next
IDLE = '#eeeeee'
_PALEST = 0.6  # share of white in the last chunk of many
_NAMED = 4  # chunks whose shades a legend names one by one


def colour(kind: str, chunk: int = 0, num_chunks: int = 1) -> str:
    """Return `#rrggbb` of a pass: the kind's hue, paler for later chunks, and upwards."""
    white = _PALEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    if kind in HUES:
        channels = [int(HUES[kind][i : i + 2], 16) for i in (1, 3, 5)]
    else:  # by its name
        place = int.from_bytes(kind.encode(), 'big') * _GOLDEN % 1
        channels = [round(255 * c) for c in colorsys.hls_to_rgb(place, 0.45, 0.55)]
    return '#' + ''.join(f'{round(c + (255 - c) * white):02x}' for c in channels)


def kinds(schedules: Iterable[Schedule]) -> dict[str, Kind]:
    """Return the kinds of pass that occur in `schedules`."""
    found: dict[str, Kind] = {}
    for schedule in schedules:
        ran = {p.kind for _, p in schedule}
        found |= {name: kind for name, kind in schedule.graph.kinds.items() if name in ran}
    return found


def legend(schedules: Iterable[Schedule]) -> list[tuple[str, str]]:
    """Return (text, colour) of each kind of pass, and of its chunks or of those upwards."""
    schedules = tuple(schedules)
    entries: list[tuple[str, str]] = []
    for name, kind in kinds(schedules).items():
        having = [s.placement for s in schedules if any(p.kind == name for _, p in s)]
        both = [placement for placement in having if not placement.is_one_way]
        down = ', down' if len(both) == len(having) else ''
        entries.append((f'{name}: {kind.words}{down}', colour(name)))
        chunks = {placement.num_chunks for placement in having if placement not in both}
        entries += [(f'{name} of {said}', colour(name, k, v)) for said, k, v in between(chunks)]
        if chunks - {1}:
            entries.append((f'{name} of the last chunk', colour(name, 1, 2)))
        if any(by_version(s) for s in schedules) and not kind.of_weights:
            entries.append((f'{name} of every other version of the weights', colour(name, 1, 2)))
        if both:
            entries.append((f'{name}, up', colour(name, 1, 2)))
    return [*entries, ('idle', IDLE)]


def between(chunks: Iterable[int]) -> list[tuple[str, int, int]]:
    """Return (text, chunk, number of chunks) for shades between those of the end chunks.

    Of more than four chunks one shade stands for all.
    """
    found: list[tuple[str, int, int]] = []
    for v in sorted({*chunks}):
        if v > _NAMED:
            found.append((f'chunks between, of {v}', v // 2, v))
        else:
            found += [(f'chunk {k + 1} of {v}', k, v) for k in range(1, v - 1)]
    return found


def by_version(schedule: Schedule) -> bool:
    """Return True where shades tell versions of the weights, and not chunks."""
    return updates_of(schedule.graph) is not None and schedule.placement.num_chunks == 1


def stripes(kind: str, top: float, height: float) -> list[float]:
    """Return where the stripes of a bar are that begins at `top`, from its foot upwards."""
    return [top + height * (1 - 0.1 * (k + 1)) for k in range(STRIPES.get(kind, 0))]


def ink(background: str) -> str:
    """Return black or white, whichever reads better on `background` (WCAG's luminance)."""
    channels = (int(background[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return '#000000' if luminance > 0.18 else '#ffffff'


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
            Bar(p, start - origin, end - origin, fill(p.kind, *shade(p)))
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
    """Return the number of the row with the passes of each rank."""
    rows = [row.rank for row in lanes(timeline)]
    return [rows.index(rank) for rank in range(timeline.schedule.num_ranks)]


def held(timeline: Timeline, costs: Costs) -> list[list[tuple[float, float]]]:
    """Return, per rank, the steps of its memory curve: (time, activations held from then on).

    An F takes its memory when it starts, and so does what comes back; the others change what is
    held when they end, a pass of several tasks also after the first of them.
    """
    slack, schedule = 1e-9 * timeline.makespan, timeline.schedule
    amounts = zip(bars(timeline), live(schedule, costs), highest(schedule, costs), strict=True)
    curves: list[list[tuple[float, float]]] = []
    for row, after, most in amounts:
        steps: list[tuple[float, float]] = []
        for time, amount in _changes(row, after, most, schedule.graph, costs):
            if steps and time - steps[-1][0] <= slack:  # all at once
                time = steps.pop()[0]
            steps.append((time, amount))
        curves.append(steps)
    return curves


def _changes(
    row: list[Bar], after: Sequence[float], most: Sequence[float], graph: Graph, costs: Costs
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
    """Return an amount of memory as text: bytes as GiB."""
    return f'{number(value / 2**30, 3)} GiB' if value >= MANY else number(value)


def number(value: float, digits: int = 5) -> str:
    """Return `value` as text: up to `digits` significant digits, no exponent, no end zeros."""
    text = f'{value:.{digits}g}'
    return f'{float(text):.0f}' if 'e+' in text else text
