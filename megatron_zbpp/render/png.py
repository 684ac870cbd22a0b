"""Pictures through matplotlib (an extra): timelines, loss curves, and what memory buys."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# (matplotlib leaves much of its keyword arguments open)

from __future__ import annotations

import itertools
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from megatron_zbpp.ir.timeline import MEANING, Timeline
from megatron_zbpp.render import scene
from megatron_zbpp.techniques.updates.versions import UPDATE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox


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

    Grey ends where a timeline ends. It is a PDF where the suffix says so. `width` is in inches,
    `heading` what all have in common; `baseline` names the timeline against which shorter ones show
    what they save.
    """
    heights = [0.9 + 0.3 * len(scene.lanes(line)) for line in timelines.values()]
    figure = new_figure(width, min(sum(heights) + 0.5, _HIGHEST))
    rows = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={'height_ratios': heights}
    )
    longest = max(line.makespan for line in timelines.values()) or 1.0
    for axes, (name, timeline) in zip(rows[:, 0], timelines.items(), strict=True):
        room = min(1.0, _HIGHEST / sum(heights))  # of the height that rows have in small pictures
        _draw(axes, timeline, _DIGIT * longest / (width - 1.0), room)
        said = fitted(f'{name}   {scene.figures(timeline)}', width, 11)
        axes.set_title(said, loc='left', fontsize=11, parse_math=False)
        axes.set_xlim(0, longest)
        if baseline is not None:
            _mark_saving(axes, timeline.makespan, timelines[baseline].makespan)
    rows[-1, 0].set_xlabel(f'time ({unit})' if unit else 'time')
    figure.supxlabel(MEANING, fontsize=9, color='#555555')
    entries = scene.legend(line.schedule for line in timelines.values())
    _head(figure, entries, (title, 14), (heading, 11))
    to = 'pdf' if Path(path).suffix.lower() == '.pdf' else 'png'
    figure.savefig(path, dpi=130, format=to)


def loss_png(curves: Mapping[str, Sequence[float]], path: str | Path) -> None:
    """Draw loss against iteration, one curve each; curves that coincide stay visible."""
    figure = new_figure(8.0, 4.5)
    axes = figure.subplots()
    hues = list(scene.HUES.values())
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
    """Return `text` broken into lines of `width` inches at `size` points."""
    return textwrap.fill(text, int(72 * (width - 1.0) / (_LETTER * size)))


def _draw(axes: Axes, timeline: Timeline, digit: float, room: float) -> None:
    rows = scene.lanes(timeline)
    labels = room > 0.6 and sum(len(row.bars) for row in rows) <= _MOST_LABELS
    every = ceil(0.6 / room)
    for place, row in enumerate(rows):
        foot = place - _BAR / 2
        axes.broken_barh([(0, timeline.makespan)], (foot, _BAR), facecolors=scene.IDLE, zorder=0)
        bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
        feet: list[tuple[float, float, float, str]] = []
        for p, start, end, fill in row.bars:
            bars[fill].append((start, end - start))
            feet += ((y, start, end, scene.ink(fill)) for y in scene.stripes(p.kind, foot, _BAR))
            text = str(p.microbatch)
            if labels and digit * len(text) < end - start:
                axes.text(
                    (start + end) / 2, place, text,
                    color=scene.ink(fill), ha='center', va='center', fontsize=8, clip_on=True,
                )  # fmt: skip
        for fill, extents in bars.items():
            axes.broken_barh(extents, (foot, _BAR), facecolors=fill, edgecolors='white', lw=0.3)
        updates = [bar.start for bar in scene.steps(row.bars)]
        if updates:
            axes.vlines(updates, place - 0.5, place + 0.5, colors=scene.colour(UPDATE), lw=1.5)
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

    handles: list[Patch] = []
    for text, fill in entries:
        feet = scene.STRIPES.get(text.split()[0].strip(':'), 0)
        told = f' ({feet} stripe{"s" if feet > 1 else ""})' if feet else ''
        handles.append(Patch(facecolor=fill, label=f'{text}{told}'))
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


def bars_png(
    runs: Mapping[str, Sequence[float]], notes: Sequence[str], path: str | Path, title: str
) -> None:
    """Draw medians as bars, the first at the top, each with its median and note.

    `runs` are milliseconds of a step, one of each run, by schedule; the suffix says PNG or SVG.
    """
    figure = new_figure(8.0, 1.2 + 0.5 * len(runs))
    axes, hues = figure.subplots(), list(scene.HUES.values())
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


Place = tuple[float, float]  # memory in activations of one microbatch on a full rank, idle share

_HUES = list(scene.HUES.values())
_NEAR = 7  # points from a mark to its label, where there is room
_SIZE = 8  # of a label's letters, in points
_STEPS = 40  # of a piece of the line
_RINGS = 12  # of places that are tried around a mark, each further than the one before
_SIDES = ((1, 0), (1, 0.7), (1, -0.7), (0, 1), (0, -1), (-1, 0), (-1, 0.7), (-1, -0.7))


def frontier_png(
    planned: Mapping[Place, str],
    named: Mapping[str, Place],
    path: str | Path,
    title: str,
    share: str,
) -> None:
    """Draw a line of plans, and a mark for each named schedule, each with its label.

    A plan has the name of a schedule that is as good; empty where it beats all. Names at one place
    share a mark. `share` is the figure that is drawn, "bubble" or "idle GPU time".
    """
    figure = new_figure(10.0, 7.0)
    axes = figure.subplots()
    places: dict[Place, list[str]] = defaultdict(list)
    for name, (memory, idle) in named.items():
        places[round(memory, 3), round(idle, 4)].append(name)
    axes.plot(*zip(*sorted(planned), strict=True), 'o-', color=_HUES[1], label='planned', zorder=3)
    axes.scatter(
        *zip(*places, strict=True), color=_HUES[0], marker='s', label='named schedules', zorder=2
    )
    axes.set_xlabel('peak activations per rank (microbatches of a full rank)')
    axes.set_ylabel(share)
    axes.yaxis.set_major_formatter(lambda share, _: f'{share:.0%}')
    axes.set_title('\n'.join(fitted(line, 10.0, 12) for line in title.splitlines()))
    axes.margins(x=0.12, y=0.08)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    axes.legend(loc='best')
    figure.supxlabel(MEANING, fontsize=8, color='#555555')
    labels = {place: ', '.join(names) for place, names in places.items()}
    for (memory, idle), text in planned.items():
        place = round(memory, 3), round(idle, 4)
        if text:
            labels[place] = f'{labels[place]} = planned' if place in labels else f'{text}, too'
    line = sorted(planned)
    shares = [step / _STEPS for step in range(1, _STEPS)]  # no label fits between such places
    for (x, y), (right, above) in itertools.pairwise(sorted(planned)):
        line += [(x + share * (right - x), y + share * (above - y)) for share in shares]
    _label(figure, axes, labels, line)
    figure.savefig(path, dpi=130)


def _label(figure: Figure, axes: Axes, labels: Mapping[Place, str], line: Sequence[Place]) -> None:
    figure.draw_without_rendering()  # so that all has its place
    frame, legend = axes.get_window_extent(), axes.get_legend()
    taken = [_around(axes, place) for place in (*labels, *line)]
    taken += [legend.get_window_extent()] if legend is not None else []
    for place, text in sorted(labels.items(), key=lambda entry: (entry[0][1], entry[0][0])):
        free = [at for at in _places(axes, place, text) if _free(at.box, frame, taken)]
        clear = (
            at
            for at in free
            if not any(other.contains(*each) for other in taken for each in at.leader)
        )
        found = next(clear, free[0] if free else next(_places(axes, place, text)))
        across, up, side = found.offset
        taken.append(found.box)
        far = (across, up) != (_NEAR, 0)
        arrow = {'arrowstyle': '-', 'color': '#999999', 'lw': 0.6, 'shrinkB': 3} if far else None
        axes.annotate(
            text, place, xytext=(across, up), textcoords='offset points', fontsize=_SIZE,
            va='center', ha=side, arrowprops=arrow,
        )  # fmt: skip


class _Try(NamedTuple):
    """A place where a label may be."""

    offset: tuple[float, float, str]  # from its mark, in points, and which side of it is there
    box: Bbox  # on the canvas
    leader: tuple[tuple[float, float], ...]  # places on the canvas of the line between the two


def _places(axes: Axes, place: Place, text: str) -> Iterator[_Try]:
    from matplotlib.transforms import Bbox

    probe = axes.text(0, 0, text, fontsize=_SIZE)
    size = probe.get_window_extent()
    probe.remove()
    x, y = axes.transData.transform(place)
    pixels = axes.figure.dpi / 72
    for ring in range(1, _RINGS + 1):
        for across, up in _SIDES:
            right, above = across * _NEAR * (1 + (ring - 1) / 2), up * _NEAR * ring * 1.4
            left = x + right * pixels - size.width * (1 - across) / 2
            foot = y + above * pixels - size.height / 2
            box = Bbox.from_bounds(left, foot, size.width, size.height).padded(1.0)
            side = {1: 'left', 0: 'center', -1: 'right'}[across]
            steps = [k / _STEPS for k in range(_STEPS)]
            leader = ((x + s * right * pixels, y + s * above * pixels) for s in steps)
            mark = _around(axes, place)
            far = tuple(at for at in leader if not mark.contains(*at))
            yield _Try((right, above, side), box, far)


def _free(box: Bbox, frame: Bbox, taken: Sequence[Bbox]) -> bool:
    inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
    return inside and not any(map(box.overlaps, taken))


def _around(axes: Axes, place: Place) -> Bbox:
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform(place)
    half = 4 * axes.figure.dpi / 72
    return Bbox.from_extents(x - half, y - half, x + half, y + half)
