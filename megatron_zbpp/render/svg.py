"""Timelines as one SVG picture: ranks as rows, passes as bars, memory curves below the bars.

All bars of one colour are one path, so that a picture of 100,000 passes still opens.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from html import escape

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.render import scene
from megatron_zbpp.techniques.updates.versions import UPDATE

# Within a rank's row of height 1: where its bars start, how high they are, where memory ends.
TOP, BAR, BAR_AND_MEMORY, FLOOR = 0.06, 0.88, 0.5, 0.97

_GUTTER, _MARGIN, _ROW, _MEMORY_ROW, _LETTER, _LINE = 64, 90, 26, 46, 7, 20
_STYLE = (
    'text{font:12px system-ui,"DejaVu Sans",sans-serif;fill:#1c2330}.soft{fill:#5d6879}'
    '.name{font-size:15px;font-weight:600}.label{font-size:11px;text-anchor:middle}'
    '.right{text-anchor:end}.passes path{stroke:#fff;stroke-width:1px}'
    '.stripes{fill:none;stroke-opacity:.6;stroke-width:1px;pointer-events:none}'
    '.memory{fill:#6b5b95;fill-opacity:.35;stroke:#6b5b95;stroke-width:1px}'
    'path{vector-effect:non-scaling-stroke}'
)


def svg(
    timelines: Mapping[str, Timeline],
    costs: Mapping[str, Costs] | None = None,
    unit: str = '',
    width: int = 1400,
    heading: str = '',
    title: str = '',
) -> str:
    """Draw all `timelines` below each other on one time axis; grey ends where each ends.

    Where costs are given, by the same names, memory curves are drawn. `width` is in pixels,
    `heading` what all timelines have in common.
    """
    horizon = max(line.makespan for line in timelines.values()) or 1.0
    entries, more = _legend(timelines, width)
    parts, y = [entries], 52 + more
    for style, letter, text in (('name', 10, title), ('soft', _LETTER, heading)):
        for line in textwrap.wrap(text, (width - _GUTTER) // letter):
            parts.append(f'<text class="{style}" x="{_GUTTER}" y="{y}">{escape(line)}</text>')
            y += _LINE
        y += 8 * bool(text)
    for name, timeline in timelines.items():
        cost = (costs or {}).get(name)
        row = _MEMORY_ROW if cost else _ROW
        head = f'{escape(name)}: {scene.figures(timeline)}'
        parts.append(f'<text class="name" x="{_GUTTER}" y="{y}">{head}</text>')
        panel = _panel(timeline, cost, horizon, width, row)
        parts.append(f'<g transform="translate(0 {y + 10})">{panel}</g>')
        y += 10 + row * len(scene.lanes(timeline)) + 30
    parts += (
        f'<text class="soft label" x="{_GUTTER + t * (width - _GUTTER - _MARGIN) / horizon:.6g}" '
        f'y="{y - 12}">{scene.number(t)}</text>'
        for t in scene.ticks(horizon, width // 90)
    )
    parts.append(f'<text class="soft right" x="{width - 8}" y="{y - 12}">{escape(unit)}</text>')
    y += 22
    parts.append(f'<text class="soft" x="{_GUTTER}" y="{y - 8}">{MEANING}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" '
        f'viewBox="0 0 {width} {y}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def shapes(timeline: Timeline, costs: Costs | None) -> str:
    """Return the background, bars and memory curves in the coordinates (time, rank)."""
    height = BAR_AND_MEMORY if costs else BAR
    paths: dict[str, list[str]] = defaultdict(list)
    feet: dict[str, list[str]] = defaultdict(list)
    marks = ''
    rows = scene.lanes(timeline)
    for place, row in enumerate(rows):
        for bar in row.bars:
            time = bar.end - bar.start
            paths[bar.fill].append(
                f'M{bar.start:.7g} {place + TOP:.7g}h{time:.7g}v{height}h{-time:.7g}z'
            )
            feet[scene.ink(bar.fill)] += (
                f'M{bar.start:.7g} {y:.7g}h{time:.7g}'
                for y in scene.stripes(bar.ran.kind, place + TOP, height)
            )
        marks += ''.join(f'M{bar.start:.7g} {place}v1' for bar in scene.steps(row.bars))
    end, places = timeline.makespan, range(len(rows))
    idle = ''.join(f'M0 {place + TOP:.7g}h{end:.7g}v{height}h{-end:.7g}z' for place in places)
    passes = ''.join(f'<path fill="{fill}" d="{"".join(d)}"/>' for fill, d in paths.items())
    memory = f'<path class="memory" d="{"".join(_curves(timeline, costs))}"/>' if costs else ''
    line = f'fill="none" stroke="{scene.colour(UPDATE)}" vector-effect="non-scaling-stroke"'
    updates = f'<path {line} stroke-width="3" d="{marks}"/>' if marks else ''
    stripes = ''.join(_stripes(''.join(d), shade) for shade, d in feet.items())
    return (
        f'<path class="idle" fill="{scene.IDLE}" d="{idle}"/><g class="passes">{passes}</g>'
        f'{stripes}{updates}{memory}'
    )


def _stripes(d: str, shade: str) -> str:
    return f'<path class="stripes" stroke="{shade}" d="{d}"/>' if d else ''


def _curves(timeline: Timeline, costs: Costs) -> Iterator[str]:
    curves = scene.held(timeline, costs)
    peak = max((amount for curve in curves for _, amount in curve), default=0.0) or 1.0
    room = FLOOR - TOP - BAR_AND_MEMORY - 0.04
    for place, curve in zip(scene.first_rows(timeline), curves, strict=True):
        if curve:
            steps = (f'H{t:.7g}V{place + FLOOR - room * amount / peak:.7g}' for t, amount in curve)
            yield f'M{curve[0][0]:.7g} {place + FLOOR:.7g}{"".join(steps)}V{place + FLOOR:.7g}z'


def _panel(timeline: Timeline, costs: Costs | None, horizon: float, width: int, row: int) -> str:
    scale = (width - _GUTTER - _MARGIN) / horizon
    height = BAR_AND_MEMORY if costs else BAR
    texts: list[str] = []
    for place, line in enumerate(scene.lanes(timeline)):
        y = (place + TOP + height / 2) * row + 4
        texts.append(f'<text class="soft right" x="{_GUTTER - 8}" y="{y:.5g}">{line.label}</text>')
        for bar in line.bars:
            label = str(bar.ran.microbatch)
            if (bar.end - bar.start) * scale > _LETTER * len(label) + 3:
                x = _GUTTER + (bar.start + bar.end) / 2 * scale
                texts.append(
                    f'<text class="label" x="{x:.6g}" y="{y:.5g}" '
                    f'style="fill:{scene.ink(bar.fill)}">{label}</text>'
                )
    most_of_ranks = peak(timeline.schedule, costs) if costs else ()
    for place, most in zip(scene.first_rows(timeline), most_of_ranks, strict=bool(costs)):
        x, y = width - _MARGIN + 8, (place + FLOOR) * row - 3
        texts.append(f'<text class="soft" x="{x}" y="{y:.5g}">max {scene.amount(most)}</text>')
    return (
        f'<g transform="translate({_GUTTER} 0) scale({scale:.9g} {row})">'
        f'{shapes(timeline, costs)}</g>{"".join(texts)}'
    )


def _legend(timelines: Mapping[str, Timeline], width: int) -> tuple[str, int]:
    parts: list[str] = []
    x, y = _GUTTER, 12
    for text, fill in scene.legend(line.schedule for line in timelines.values()):
        step = 26 + _LETTER * len(text) + 14
        if x > _GUTTER and x + step > width:
            x, y = _GUTTER, y + _LINE
        parts.append(f'<rect x="{x}" y="{y}" width="20" height="12" rx="2" fill="{fill}"/>')
        feet = ''.join(
            f'M{x} {to:.4g}h20' for to in scene.stripes(text.split()[0].strip(':'), y, 12)
        )
        parts.append(_stripes(feet, scene.ink(fill)))
        parts.append(f'<text x="{x + 26}" y="{y + 10}">{escape(text)}</text>')
        x += step
    return ''.join(parts), y - 12
