"""Timelines as a page of one file that needs no network: hover, zoom, pan, compare."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

from megatron_zbpp.analysis.gain import RIVAL
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, compiled
from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.render import scene
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

    Two timelines stand side by side at first. Where costs are given, by the same names, memory
    curves are drawn; `heading` is what all have in common.
    """
    costs = costs or {}
    horizon = max(line.makespan for line in timelines.values()) or 1.0
    panels = [
        _panel(index, name, line, costs.get(name), horizon)
        for index, (name, line) in enumerate(timelines.items())
    ]
    ran = [line.schedule for line in timelines.values()]
    sizes = {
        f'{s.num_ranks} ranks, {s.num_stages} stages ({s.placement.name}), '
        f'{s.num_microbatches} microbatches'
        for s in ran
    }
    subtitle = sizes.pop() if len(sizes) == 1 else f'{len(timelines)} timelines'
    data = {
        'horizon': horizon,
        'unit': unit,
        'meanings': {name: kind.words for name, kind in scene.kinds(ran).items()},
        'panels': _data(timelines, costs),
    }
    parts = {
        'title': escape(title),
        'subtitle': escape('; '.join(filter(None, [subtitle, heading]))),
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

    `parts` are by name; the style and the scripts that it names are added.
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
    rows = scene.bars(timeline)
    where = {bar.ran: (rank, i) for rank, row in enumerate(rows) for i, bar in enumerate(row)}
    slack = 1e-9 * timeline.makespan
    beside = compiled(timeline.schedule.graph).on_copy_engines

    causes: list[list[tuple[int, int]]] = []
    for rank, row in enumerate(rows):
        free = {False: 0.0, True: 0.0}  # since when an engine is, that of copies by itself
        own: list[tuple[int, int]] = [_NOTHING] * len(row)
        for i, bar in enumerate(row):
            copies = bar.ran.kind in beside
            if bar.start > free[copies] + slack:
                needed = (where[p] for p in timeline.schedule.predecessors(bar.ran))
                others = [at for at in needed if at[0] != rank]
                own[i] = max(others, key=lambda at: rows[at[0]][at[1]].end, default=_NOTHING)
            free[copies] = bar.end
        causes.append(own)
    return causes


def _data(timelines: Mapping[str, Timeline], costs: Mapping[str, Costs]) -> list[dict[str, object]]:
    orders = [line.schedule.passes for line in timelines.values()]
    found: list[dict[str, object]] = []
    for name, line in timelines.items():
        schedule, placement = line.schedule, line.schedule.placement
        _, shades = placement.shade(0, 0)
        inks = {
            kind: [scene.ink(scene.colour(kind, shade, shades)) for shade in range(shades)]
            for kind in scene.kinds([schedule])
        }
        own: dict[str, object] = {
            'name': name,
            'same': orders.index(schedule.passes),
            'row': _row_height(line),
            'bar': BAR_AND_MEMORY if name in costs else BAR,
            'chunks': list(map(placement.chunk_of, schedule.graph.sites)),
            'route': None if placement.is_one_way else placement.route,
            'inks': inks,
            'rows': list(_rows(line, costs.get(name))),
        }
        found.append(own)
    return found


def _rows(timeline: Timeline, costs: Costs | None) -> Iterator[dict[str, object]]:
    schedule = timeline.schedule
    held = live(schedule, costs) if costs else None
    hosted = live(schedule, costs, HOST) if costs and _on_host(schedule, costs) else None
    phases = schedule.phases or [()] * schedule.num_ranks
    rows, causes = scene.lanes(timeline), waits(timeline)
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


def _row_height(timeline: Timeline) -> int:
    ranks = len(scene.lanes(timeline))
    return next((height for most, height in _ROWS if ranks <= most), 14)


def _panel(index: int, name: str, timeline: Timeline, costs: Costs | None, horizon: float) -> str:
    """Return the frame of one timeline; the page's script sets widths and draws labels and axis."""
    rows, row = scene.lanes(timeline), _row_height(timeline)
    middle = TOP + (BAR_AND_MEMORY if costs else BAR) / 2
    texts = [
        f'<text class="quiet" text-anchor="end" x="{_GUTTER - 10}" '
        f'y="{(place + middle) * row + 4:.5g}">{line.label}</text>'
        for place, line in enumerate(rows)
    ]
    if costs:
        texts += [
            f'<text class="quiet peak" y="{(place + FLOOR) * row - 2:.5g}">'
            f'max {scene.amount(most)}</text>'
            for place, most in zip(
                scene.first_rows(timeline), peak(timeline.schedule, costs), strict=True
            )
        ]
    return (
        f'<section><h2>{escape(name)}</h2><div class="facts">{scene.figures(timeline)}</div>'
        f'<svg class="view" id="panel-{index}" height="{len(rows) * row + 26}" role="img" '
        f'aria-label="timeline {escape(name)}">{"".join(texts)}'
        f'<svg class="stretch" x="{_GUTTER}" y="0" height="{len(rows) * row}" '
        f'preserveAspectRatio="none"><rect width="{horizon:.9g}" height="{len(rows)}" '
        f'fill="transparent"/>{shapes(timeline, costs)}</svg>'
        '<g class="axis"></g><g class="labels"></g><g class="marks"></g></svg></section>'
    )


def _summary(timelines: Mapping[str, Timeline], costs: Mapping[str, Costs]) -> str:
    """Return a table with a line for each timeline, linked to it; the page's script sorts them."""
    rows: list[str] = []
    heads: list[str] = []
    known, rival = timelines.keys() & costs.keys(), timelines.get(RIVAL)
    rival = rival if rival and rival.makespan else None
    hosted = {name: _on_host(timelines[name].schedule, costs[name]) for name in known}
    for index, (name, line) in enumerate(timelines.items()):
        steady = steady_state(line)
        taken, bubble = line.makespan, line.bubble
        if steady is not None:
            taken, bubble = steady.period, steady.bubble
        drained = scene.number(taken), scene.number(max(line.windows)), f'{line.idle_all_ranks:.2%}'
        makespan, window, idle = drained if steady is None else '---'
        most = scene.amount(max(peak(line.schedule, costs[name]))) if name in costs else 'unknown'
        cells = {'makespan': makespan}
        cells |= {f'gain over {RIVAL}': f'{1 - taken / rival.makespan:.1%}'} if rival else {}
        cells |= {'longest window': window, 'bubble': f'{bubble:.2%}', 'idle GPU time': idle}
        cells |= {'peak activations': most}
        if any(hosted.values()):
            cells |= {'most on the host': scene.amount(hosted.get(name, 0.0))}
        link, heads = f'<a href="#panel-{index}">{escape(name)}</a>', [*cells]
        own = ''.join(f'<td>{cell}</td>' for cell in cells.values())
        rows.append(f'<tr><td>{link}</td>{own}</tr>')
    several = len(timelines) > 1
    head = ''.join(f'<th>{f"<button>{text}</button>" if several else text}</th>' for text in heads)
    caption = f'<caption class="soft">{MEANING}</caption>'
    head = f'<thead><tr><th></th>{head}</tr></thead>'
    return f'<table class="summary">{caption}{head}<tbody>{"".join(rows)}</tbody></table>'


def _legend(timelines: Mapping[str, Timeline]) -> Iterator[str]:
    for text, fill in scene.legend(line.schedule for line in timelines.values()):
        shade = 'var(--idle)' if fill == scene.IDLE else fill
        feet = _FOOT * scene.STRIPES.get(text.split()[0].strip(':'), 0)
        style = f'background:{shade};color:{scene.ink(fill)}'
        yield f'<li><i style="{style}">{feet}</i>{escape(text)}</li>'
    yield '<li><i style="background:var(--memory);opacity:.5"></i>activations held</li>'
