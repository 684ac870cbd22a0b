"""Drawings of schedules: text for terminals, and what notebooks show and Python can save.

Text has a line for each rank, a letter's width for each bit of time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median_low

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.render.html import html
from megatron_zbpp.render.png import timeline_png
from megatron_zbpp.render.scene import Bar, Lane, ink, lanes
from megatron_zbpp.render.svg import svg

_IDLE = '·'


def timeline_text(timeline: Timeline, width: int = 100, colours: bool = False) -> str:
    """Draw each rank's passes to scale: `3F1`, or less of that where there is less room.

    The whole timeline if each pass gets a letter in `width`, otherwise its first part and `…`. A
    width of 0 never cuts.
    """
    rows, scale, columns = _fitted(timeline, width)
    label = _gutter(timeline)
    return '\n'.join(
        (row.label.ljust(label) + _line(row.bars, scale, columns, colours)).rstrip() for row in rows
    )


def time_shown(timeline: Timeline, width: int = 100) -> float:
    """Return how much of the makespan `timeline_text` shows in that width."""
    _, scale, columns = _fitted(timeline, width)
    needed = round(timeline.makespan * scale)
    return timeline.makespan if needed <= columns else columns / scale


def examples(timeline: Timeline, width: int = 100) -> list[str]:
    """Explain the labels that `timeline_text` draws in that width: one of each form, in words."""
    rows, scale, columns = _fitted(timeline, width)
    found: dict[str, str] = {}
    for bar in (bar for row in rows for bar in row.bars):
        p, first, last = bar.ran, round(bar.start * scale), round(bar.end * scale)
        label = _label(bar, last - first) if last <= columns else ''
        if label == str(p):
            found.setdefault('stage', f'{label} is {p.words}')
        elif label == f'{p.kind}{p.microbatch}':
            found.setdefault('microbatch', f'{label} is {p.kind} microbatch {p.microbatch}')
        elif label:
            found.setdefault('letter', 'a letter alone: no room for numbers (--width 0 shows them)')
            found |= {p.kind: f'{label} is {p.kind}'} if label != p.kind else {}
    return [*found.values()]


def _fitted(timeline: Timeline, width: int) -> tuple[list[Lane], float, int]:
    """Return lanes, characters per unit of time, and characters that passes may take."""
    rows = lanes(timeline)
    columns = max(1, width - _gutter(timeline) - 1) if width else sys.maxsize
    every = [bar for row in rows for bar in row.bars]
    typical = median_low([bar.end - bar.start for bar in every] or [0.0])
    if not typical:
        return rows, 0.0, columns
    enough = 1 + max(len(str(bar.ran)) for bar in every)
    characters = min(int(columns * typical / timeline.makespan), enough)  # of a typical pass
    return rows, (characters or enough) / typical, columns


def _gutter(timeline: Timeline) -> int:
    """Return characters before the first pass: `rank 12  `."""
    return max(len(row.label) for row in lanes(timeline)) + 2


def _line(row: list[Bar], scale: float, columns: int, colours: bool) -> str:
    parts: list[str] = []
    at = 0
    for bar in row:
        first, last = round(bar.start * scale), round(bar.end * scale)
        if first >= columns:
            break
        cell = _label(bar, last - first).ljust(last - first)[: columns - first]
        if colours and cell:
            back, front = (
                ';'.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
                for colour in (bar.fill, ink(bar.fill))
            )
            cell = f'\x1b[48;2;{back};38;2;{front}m{cell}\x1b[0m'
        parts += [_IDLE * (first - at), cell]
        at = min(last, columns)
    cut = bool(row) and round(row[-1].end * scale) > columns
    return ''.join(parts) + ('…' if cut else '')


def _label(bar: Bar, room: int) -> str:
    kind = bar.ran.kind
    names = (str(bar.ran), f'{kind}{bar.ran.microbatch}', kind[0])
    return next((name for name in names if len(name) < room), kind[0])[:room]


@dataclass(frozen=True)
class Drawing:
    """A schedule as simulated by its costs."""

    timeline: Timeline  # simulated
    costs: Costs  # by which it was

    def __str__(self) -> str:
        """Draw it in letters, as `zbpp show` does."""
        return timeline_text(self.timeline)

    def _repr_svg_(self) -> str:
        return svg(self._timelines, self._costs)

    def _repr_html_(self) -> str:
        """Draw it for a notebook as a page of its own, whose passes explain themselves."""
        page = escape(html(self._timelines, self._costs, self.timeline.schedule.name))
        height = 240 + 70 * self.timeline.schedule.num_ranks
        return f'<iframe srcdoc="{page}" width="100%" height="{height}" frameborder="0"></iframe>'

    def save(self, path: str | Path) -> None:
        """Write it as .html, .svg, .png or .pdf."""
        suffix = Path(path).suffix.lower()
        if suffix in ('.png', '.pdf'):
            timeline_png(self._timelines, path)
        elif suffix == '.svg':
            Path(path).write_text(self._repr_svg_(), encoding='utf-8')
        elif suffix == '.html':
            page = html(self._timelines, self._costs, self.timeline.schedule.name)
            Path(path).write_text(page, encoding='utf-8')
        else:
            raise ValueError(f'{str(path)!r} names no format: end it in .html, .svg, .png or .pdf')

    @property
    def _timelines(self) -> dict[str, Timeline]:
        return {self.timeline.schedule.name: self.timeline}

    @property
    def _costs(self) -> dict[str, Costs]:
        return {self.timeline.schedule.name: self.costs}


def draw(schedule: Schedule, costs: Costs | None = None) -> Drawing:
    """Return a drawing of a schedule: notebooks show it, `print` writes it in letters.

    Args:
        schedule: that `check` accepts.
        costs: of its stages. None: those that it was planned for; else F, B and W of a full rank
            take 1 each.

    >>> from megatron_zbpp import build, draw
    >>> print(draw(build('zb-h1', 2, 2)))
    rank 0  0F0 0F1 ····0B0 0W0 0B1 0W1
    rank 1  ····1F0 1B0 1F1 1B1 1W0 1W1
    """
    costs = costs or Costs.known(schedule)
    return Drawing(simulate(schedule, costs), costs)
