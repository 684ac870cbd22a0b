"""Timelines as a page of one file that needs no network: hover, zoom, pan, compare."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

from megatron_zbpp.analysis.gain import RIVAL
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.render.colours import IDLE, STRIPES, colour, ink, kinds, legend
from megatron_zbpp.render.scene import Bar, amount, bars, figures, first_rows, lanes, number
from megatron_zbpp.render.svg import BAR, BAR_AND_MEMORY, FLOOR, TOP, shapes
from megatron_zbpp.techniques.updates.versions import steady_state

_GUTTER = 64  # as in page.html
_ROWS = ((16, 50), (32, 36), (64, 24))  # up to so many ranks, a row has so many pixels
_NOTHING = (-1, -1)
_SCRIPTS = ('viewer', 'simulate', 'uploads', 'planner')  # files that pages take whole
_FOOT = '<s></s>'  # a stripe of a colour in the legend


def html(
    timelines: Mapping[str, Timeline],
    costs: Mapping[str, Costs] | None = None,
    title: str = 'Pipeline timeline',
    unit: str = '',
    heading: str = '',
) -> str:
    """Return a page of all `timelines`; those with equal orders explain each other when hovered.

    Args:
        timelines: by name, such as `simulated` and `measured`. Two stand side by side at first.
        costs: by the same names; where given, memory curves are drawn.
        title: of the page.
        unit: of the times, for the axis: `s`.
        heading: what all of them have in common, such as the times of passes.
    """
    costs = costs or {}
    horizon = max(line.makespan for line in timelines.values()) or 1.0
    panels = [
        _panel(index, name, line, costs.get(name), horizon)
        for index, (name, line) in enumerate(timelines.items())
    ]
    ran = [line.schedule for line in timelines.values()]
    data = {
        'horizon': horizon,
        'unit': unit,
        'meanings': {name: kind.words for name, kind in kinds(ran).items()},
        'panels': _data(timelines, costs),
    }
    parts = {
        'title': escape(title),
        'subtitle': escape('; '.join(filter(None, [_subtitle(timelines), heading]))),
        'summary': _summary(timelines, costs),
        'legend': ''.join(_legend(timelines)),
        'panels': ''.join(panels),
        'data': embedded(data),
    }
    return filled('page.html', parts)


def embedded(data: object) -> str:
    """Return `data` as JSON for an element of a page."""
    return json.dumps(data, separators=(',', ':')).replace('<', '\\u003c')


def filled(name: str, parts: Mapping[str, str]) -> str:
    """Return a page of this folder with its `@part@`s filled in.

    Args:
        name: of its file.
        parts: by name; the style and the scripts that it names are added.
    """
    folder = files('megatron_zbpp.render')
    page = folder.joinpath(name).read_text(encoding='utf-8')
    own = {
        Path(file).stem: folder.joinpath(file).read_text(encoding='utf-8')
        for file in ('style.css', *(f'{script}.js' for script in _SCRIPTS))
        if f'@{Path(file).stem}@' in page
    }
    own |= parts
    return re.sub('@(' + '|'.join(own) + ')@', lambda match: own[match[1]], page)


def waits(timeline: Timeline) -> list[list[tuple[int, int]]]:
    """Return, for each pass before which its rank idled, (rank, index) of the pass it waited for.

    That is what it needs from another rank and came last; (-1, -1) for all other passes.
    """
    rows = bars(timeline)
    where = {bar.ran: (rank, i) for rank, row in enumerate(rows) for i, bar in enumerate(row)}
    slack = 1e-9 * timeline.makespan
    beside = compiled(timeline.schedule.graph).on_copy_engines

    def cause(rank: int, bar: Bar, free: float) -> tuple[int, int]:
        if bar.start <= free + slack:
            return _NOTHING
        needed = [where[p] for p in timeline.schedule.predecessors(bar.ran) if where[p][0] != rank]
        return max(needed, key=lambda at: rows[at[0]][at[1]].end, default=_NOTHING)

    return [list(_caused(rank, row, beside, cause)) for rank, row in enumerate(rows)]


def _caused(
    rank: int,
    row: list[Bar],
    beside: frozenset[str],
    cause: Callable[[int, Bar, float], tuple[int, int]],
) -> Iterator[tuple[int, int]]:
    """Yield the cause of each bar, given when its engine was free."""
    free = {False: 0.0, True: 0.0}
    for bar in row:
        copies = bar.ran.kind in beside
        yield cause(rank, bar, free[copies])
        free[copies] = bar.end


def _data(timelines: Mapping[str, Timeline], costs: Mapping[str, Costs]) -> list[dict[str, object]]:
    orders = [line.schedule.passes for line in timelines.values()]
    return [
        {
            'name': name,
            'same': orders.index(line.schedule.passes),
            'row': _row_height(line),
            'bar': BAR_AND_MEMORY if name in costs else BAR,
            'chunks': list(map(line.schedule.placement.chunk_of, line.schedule.graph.sites)),
            'route': None if line.schedule.placement.is_one_way else line.schedule.placement.route,
            'inks': _inks(line.schedule),
            'rows': list(_rows(line, costs.get(name))),
        }
        for name, line in timelines.items()
    ]


def _rows(timeline: Timeline, costs: Costs | None) -> Iterator[dict[str, object]]:
    schedule = timeline.schedule
    held = live(schedule, costs) if costs else None
    hosted = live(schedule, costs, HOST) if costs and _on_host(schedule, costs) else None
    phases = schedule.phases or [()] * schedule.num_ranks
    rows, causes = lanes(timeline), waits(timeline)
    where = {
        (row.rank, place): (lane, i)
        for lane, row in enumerate(rows)
        for i, place in enumerate(row.places)
    }
    for row in rows:
        yield {
            'rank': row.rank,
            'kinds': [bar.ran.kind for bar in row.bars],
            'stages': [bar.ran.stage for bar in row.bars],
            'microbatches': [bar.ran.microbatch for bar in row.bars],
            'slices': [bar.ran.slice for bar in row.bars],
            'starts': [float(f'{bar.start:.9g}') for bar in row.bars],
            'ends': [float(f'{bar.end:.9g}') for bar in row.bars],
            'waits': [where.get(causes[row.rank][place], _NOTHING) for place in row.places],
            'live': [held[row.rank][place] for place in row.places] if held else None,
            'host': [hosted[row.rank][place] for place in row.places] if hosted else None,
            'phases': [
                (bisect_left(row.places, first), label) for first, label in phases[row.rank]
            ],
        }


def _on_host(schedule: Schedule, costs: Costs) -> float:
    """Return the most activations that a rank has on the host."""
    return max(max(held, default=0.0) for held in live(schedule, costs, HOST))


def _inks(schedule: Schedule) -> dict[str, list[str]]:
    _, shades = schedule.placement.shade(0, 0)
    return {
        kind: [ink(colour(kind, shade, shades)) for shade in range(shades)]
        for kind in kinds([schedule])
    }


def _row_height(timeline: Timeline) -> int:
    ranks = len(lanes(timeline))
    return next((height for most, height in _ROWS if ranks <= most), 14)


def _panel(index: int, name: str, timeline: Timeline, costs: Costs | None, horizon: float) -> str:
    """Return the frame of one timeline; the page's script sets widths and draws labels and axis."""
    rows, row = lanes(timeline), _row_height(timeline)
    middle = TOP + (BAR_AND_MEMORY if costs else BAR) / 2
    texts = [
        f'<text class="quiet" text-anchor="end" x="{_GUTTER - 10}" '
        f'y="{(place + middle) * row + 4:.5g}">{line.label}</text>'
        for place, line in enumerate(rows)
    ]
    if costs:
        texts += [
            f'<text class="quiet peak" y="{(place + FLOOR) * row - 2:.5g}">'
            f'max {amount(most)}</text>'
            for place, most in zip(
                first_rows(timeline), peak(timeline.schedule, costs), strict=True
            )
        ]
    return (
        f'<section><h2>{escape(name)}</h2><div class="facts">{figures(timeline)}</div>'
        f'<svg class="view" id="panel-{index}" height="{len(rows) * row + 26}" role="img" '
        f'aria-label="timeline {escape(name)}">{"".join(texts)}'
        f'<svg class="stretch" x="{_GUTTER}" y="0" height="{len(rows) * row}" '
        f'preserveAspectRatio="none"><rect width="{horizon:.9g}" height="{len(rows)}" '
        f'fill="transparent"/>{shapes(timeline, costs)}</svg>'
        '<g class="axis"></g><g class="labels"></g><g class="marks"></g></svg></section>'
    )


def _subtitle(timelines: Mapping[str, Timeline]) -> str:
    shapes = {
        f'{s.num_ranks} ranks, {s.num_stages} stages ({s.placement.name}), '
        f'{s.num_microbatches} microbatches'
        for s in (line.schedule for line in timelines.values())
    }
    return shapes.pop() if len(shapes) == 1 else f'{len(timelines)} timelines'


def _summary(timelines: Mapping[str, Timeline], costs: Mapping[str, Costs]) -> str:
    """Return a table with a line for each timeline, linked to it; the page's script sorts them."""
    rows: list[str] = []
    known, rival = timelines.keys() & costs.keys(), timelines.get(RIVAL)
    rival = rival if rival and rival.makespan else None
    hosted = {name: _on_host(timelines[name].schedule, costs[name]) for name in known}
    for index, (name, line) in enumerate(timelines.items()):
        steady = steady_state(line)
        taken, bubble = line.makespan, line.bubble
        if steady is not None:
            taken, bubble = steady.period, steady.bubble
        drained = number(taken), number(max(line.windows)), f'{line.idle_all_ranks:.2%}'
        makespan, window, idle = drained if steady is None else '---'
        cells = [
            makespan,
            *([f'{1 - taken / rival.makespan:.1%}'] if rival else []),
            window,
            f'{bubble:.2%}',
            idle,
            amount(max(peak(line.schedule, costs[name]))) if name in costs else 'unknown',
            *([amount(hosted.get(name, 0.0))] if any(hosted.values()) else []),
        ]
        link = f'<a href="#panel-{index}">{escape(name)}</a>'
        rows.append(f'<tr><td>{link}</td>{"".join(f"<td>{c}</td>" for c in cells)}</tr>')
    heads = (
        'makespan',
        *([f'gain over {RIVAL}'] if rival else []),
        'longest window',
        'bubble',
        'idle GPU time',
        'peak activations',
        *(['most on the host'] if any(hosted.values()) else []),
    )
    several = len(timelines) > 1
    head = ''.join(f'<th>{f"<button>{text}</button>" if several else text}</th>' for text in heads)
    caption = f'<caption class="soft">{MEANING}</caption>'
    head = f'<thead><tr><th></th>{head}</tr></thead>'
    return f'<table class="summary">{caption}{head}<tbody>{"".join(rows)}</tbody></table>'


def _legend(timelines: Mapping[str, Timeline]) -> Iterator[str]:
    for text, fill in legend(line.schedule for line in timelines.values()):
        shade = 'var(--idle)' if fill == IDLE else fill
        feet = _FOOT * STRIPES.get(text.split()[0].strip(':'), 0)
        style = f'background:{shade};color:{ink(fill)}'
        yield f'<li><i style="{style}">{feet}</i>{escape(text)}</li>'
    yield '<li><i style="background:var(--memory);opacity:.5"></i>activations held</li>'
