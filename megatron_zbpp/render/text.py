"""Timelines as text for terminals: a line for each rank, a letter's width for each bit of time."""

from __future__ import annotations

import sys
from statistics import median_low

from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.render.colours import ink
from megatron_zbpp.render.scene import Bar, Lane, lanes

_IDLE = '·'


def timeline_text(timeline: Timeline, width: int = 100, colours: bool = False) -> str:
    """Draw each rank's passes to scale: `3F1`, or less of that where there is less room.

    The whole timeline if each pass gets a letter in `width`, otherwise its first part and `…`.

    Args:
        timeline: simulated or measured.
        width: most characters in a line; 0 never cuts.
        colours: with ANSI colours, as in the other pictures.
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
    return rows, _scale([row.bars for row in rows], timeline.makespan, columns), columns


def _gutter(timeline: Timeline) -> int:
    """Return characters before the first pass: `rank 12  `."""
    return max(len(row.label) for row in lanes(timeline)) + 2


def _scale(rows: list[list[Bar]], makespan: float, columns: int) -> float:
    """Return characters per unit of time: a whole number of them for a typical pass."""
    typical = median_low([bar.end - bar.start for row in rows for bar in row] or [0.0])
    if not typical:
        return 0.0
    enough = 1 + max(len(str(bar.ran)) for row in rows for bar in row)
    characters = min(int(columns * typical / makespan), enough)
    return (characters or enough) / typical


def _line(row: list[Bar], scale: float, columns: int, colours: bool) -> str:
    parts: list[str] = []
    at = 0
    for bar in row:
        first, last = round(bar.start * scale), round(bar.end * scale)
        if first >= columns:
            break
        cell = _label(bar, last - first).ljust(last - first)[: columns - first]
        parts += [_IDLE * (first - at), _paint(cell, bar.fill) if colours else cell]
        at = min(last, columns)
    cut = bool(row) and round(row[-1].end * scale) > columns
    return ''.join(parts) + ('…' if cut else '')


def _label(bar: Bar, room: int) -> str:
    kind = bar.ran.kind
    names = (str(bar.ran), f'{kind}{bar.ran.microbatch}', kind[0])
    return next((name for name in names if len(name) < room), kind[0])[:room]


def _paint(cell: str, fill: str) -> str:
    def code(colour: str) -> str:
        return ';'.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))

    return f'\x1b[48;2;{code(fill)};38;2;{code(ink(fill))}m{cell}\x1b[0m' if cell else ''
