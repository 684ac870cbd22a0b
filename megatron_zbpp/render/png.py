"""Pictures through matplotlib (an extra): timelines, loss curves."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# (matplotlib leaves much of its keyword arguments open)

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.render.colours import HUES, IDLE, STRIPES, colour, ink, legend, stripes
from megatron_zbpp.render.scene import figures, lanes, steps
from megatron_zbpp.techniques.updates.graph import UPDATE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.86  # height of a pass; a rank's row is 1
_DIGIT = 0.075  # inches that a digit of a label takes
_LETTER = 0.62  # of its size, which a letter of a text takes
_HIGHEST = 100.0  # inches that timelines take; rows of more are narrower
_MOST_LABELS = 4000  # more would take matplotlib minutes and nobody can read them


def timeline_png(
    timelines: Mapping[str, Timeline],
    path: str | Path,
    unit: str = '',
    width: float = 14.0,
    heading: str = '',
    baseline: str | None = None,
    title: str = '',
) -> None:
    """Draw timelines below each other on one time axis: a row for passes of a rank, one for copies.

    Grey ends where a timeline ends.

    Args:
        timelines: by the name that heads each.
        path: where to write: PDF where its suffix says so, else PNG.
        unit: of the times, for the axis: `s`.
        width: inches.
        heading: what all of them have in common, such as the times of passes.
        baseline: name of the timeline against which shorter ones show what they save.
        title: heads the picture.

    Raises:
        ImportError: matplotlib is not installed; the message tells how.
    """
    heights = [0.9 + 0.3 * len(lanes(line)) for line in timelines.values()]
    figure = new_figure(width, min(sum(heights) + 0.5, _HIGHEST))
    rows = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={'height_ratios': heights}
    )
    longest = max(line.makespan for line in timelines.values()) or 1.0
    for axes, (name, timeline) in zip(rows[:, 0], timelines.items(), strict=True):
        room = min(1.0, _HIGHEST / sum(heights))  # of the height that rows have in small pictures
        _draw(axes, timeline, _DIGIT * longest / (width - 1.0), room)
        said = fitted(f'{name}   {figures(timeline)}', width, 11)
        axes.set_title(said, loc='left', fontsize=11, parse_math=False)
        axes.set_xlim(0, longest)
        if baseline is not None:
            _mark_saving(axes, timeline.makespan, timelines[baseline].makespan)
    rows[-1, 0].set_xlabel(f'time ({unit})' if unit else 'time')
    figure.supxlabel(MEANING, fontsize=9, color='#555555')
    entries = legend(line.schedule for line in timelines.values())
    _head(figure, entries, (title, 14), (heading, 11))
    to = 'pdf' if Path(path).suffix.lower() == '.pdf' else 'png'
    figure.savefig(path, dpi=130, format=to)


def loss_png(curves: Mapping[str, Sequence[float]], path: str | Path) -> None:
    """Draw loss against iteration, one curve each; curves that coincide stay visible."""
    figure = new_figure(8.0, 4.5)
    axes = figure.subplots()
    hues = list(HUES.values())
    for i, (name, losses) in enumerate(curves.items()):
        thickness = 1.5 + 2.5 * (len(curves) - 1 - i)  # later and thinner on top of earlier
        iterations = range(1, len(losses) + 1)
        axes.plot(iterations, losses, label=name, color=hues[i % len(hues)], lw=thickness)
    if len(curves) > 1 and len({tuple(losses) for losses in curves.values()}) == 1:
        axes.set_title(f'{len(curves)} runs, one curve: their losses are equal bit for bit')
    axes.set_xlabel('iteration')
    axes.set_ylabel('loss')
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130, format='png')


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that draws without a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install matplotlib') from error
    return Figure((width, height), layout='constrained')


def fitted(text: str, width: float, size: float) -> str:
    """Return `text` in as many lines as it takes at `size` points in `width` inches."""
    return textwrap.fill(text, int(72 * (width - 1.0) / (_LETTER * size)))


def _draw(axes: Axes, timeline: Timeline, digit: float, room: float) -> None:
    """Put the passes of `timeline` on `axes`."""
    rows = lanes(timeline)
    labels = room > 0.6 and sum(len(row.bars) for row in rows) <= _MOST_LABELS
    every = ceil(0.6 / room)
    for place, row in enumerate(rows):
        foot = place - _BAR / 2
        axes.broken_barh([(0, timeline.makespan)], (foot, _BAR), facecolors=IDLE, zorder=0)
        bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
        feet: list[tuple[float, float, float, str]] = []
        for p, start, end, fill in row.bars:
            bars[fill].append((start, end - start))
            feet += ((y, start, end, ink(fill)) for y in stripes(p.kind, foot, _BAR))
            text = str(p.microbatch)
            if labels and digit * len(text) < end - start:
                axes.text(
                    (start + end) / 2, place, text,
                    color=ink(fill), ha='center', va='center', fontsize=8, clip_on=True,
                )  # fmt: skip
        for fill, extents in bars.items():
            axes.broken_barh(extents, (foot, _BAR), facecolors=fill, edgecolors='white', lw=0.3)
        updates = [bar.start for bar in steps(row.bars)]
        if updates:
            axes.vlines(updates, place - 0.5, place + 0.5, colors=colour(UPDATE), lw=1.5)
        if feet:
            axes.hlines(*zip(*feet, strict=True), lw=0.6, alpha=0.6)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names = [row.label.removeprefix('rank ') for row in rows]
    axes.set_yticks(range(0, len(rows), every), names[::every])
    axes.set_ylabel('rank')
    axes.spines[['top', 'right', 'left']].set_visible(False)


def _mark_saving(axes: Axes, makespan: float, baseline: float) -> None:
    """Mark the time between `makespan` and that of the baseline, if it is longer."""
    if makespan >= baseline:
        return
    first, last = axes.get_ylim()
    middle = (first + last) / 2
    arrow = {'arrowstyle': '<->', 'color': '#c0392b', 'lw': 1.5}
    axes.annotate('', (baseline, middle), (makespan, middle), arrowprops=arrow)
    axes.text(
        (makespan + baseline) / 2, middle, f'saves {1 - makespan / baseline:.0%}',
        color='#c0392b', ha='center', va='bottom', fontsize=11, fontweight='bold',
    )  # fmt: skip


def _head(figure: Figure, entries: Iterable[tuple[str, str]], *lines: tuple[str, int]) -> None:
    """Make the figure higher by `lines`, (text, points), and by the legend below them."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=fill, label=f'{text}{_feet(text)}') for text, fill in entries]
    how: dict[str, Any] = {'loc': 'upper center', 'frameon': False, 'fontsize': 9}
    columns = 5
    while True:
        box = figure.legend(handles=handles, ncols=columns, **how)
        box.set_in_layout(False)
        size = box.get_window_extent()
        if columns == 1 or size.width <= figure.bbox.width:
            break
        box.remove()
        columns -= 1
    texts = [(fitted(text, figure.get_figwidth(), of), of) for text, of in lines if text]
    depths = [0.1, *(1.45 * of * (text.count('\n') + 1) / 72 for text, of in texts)]
    head = sum(depths) + size.height / figure.dpi
    whole = figure.get_figheight() + head
    figure.set_figheight(whole)
    tops = [1 - depth / whole for depth in accumulate(depths)]
    for y, (text, of) in zip(tops, texts, strict=False):
        place: dict[str, Any] = {'ha': 'center', 'va': 'top', 'in_layout': False}
        figure.text(0.5, y, text, fontsize=of, parse_math=False, **place)
    box.set_bbox_to_anchor((0, 0, 1, tops[-1] + 0.1 / whole), figure.transFigure)
    cast('Any', figure.get_layout_engine()).set(rect=(0, 0, 1, 1 - head / whole))


def _feet(text: str) -> str:
    count = STRIPES.get(text.split()[0].strip(':'), 0)
    return f' ({count} stripe{"s" if count > 1 else ""})' if count else ''


def bars_png(
    runs: Mapping[str, Sequence[float]], notes: Sequence[str], path: str | Path, title: str
) -> None:
    """Draw medians as bars, the first at the top, each with its median and note.

    Args:
        runs: milliseconds of a step, one of each run, by schedule.
        notes: of each schedule, behind its median; empty: none.
        path: where to write, as PNG or SVG by its suffix.
        title: heads the picture.

    Raises:
        ImportError: matplotlib is not installed; the message tells how.
    """
    figure = new_figure(8.0, 1.2 + 0.5 * len(runs))
    axes, hues = figure.subplots(), list(HUES.values())
    middle = {name: median(times) for name, times in runs.items()}
    axes.barh(list(middle), list(middle.values()), color=hues[0], height=0.6)
    for place, ((name, times), note) in enumerate(zip(runs.items(), notes, strict=True)):
        axes.plot(times, [place] * len(times), '|', color=hues[1], markersize=12)
        said = f' {middle[name]:.1f}' + (f' ({note})' if note else '')
        axes.text(max(times), place, said, va='center')
    axes.margins(x=0.18)
    axes.invert_yaxis()
    axes.set_xlabel('ms a step; bars: median of the runs, marks: each of them')
    axes.set_title(fitted(title, 8.0, 12))
    figure.savefig(path, dpi=130)
