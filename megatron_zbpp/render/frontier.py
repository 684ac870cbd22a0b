"""The picture of what memory buys: idle share against memory, of plans and named schedules."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# (matplotlib leaves much of its keyword arguments open)

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.render.colours import HUES
from megatron_zbpp.render.png import fitted, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

Place = tuple[float, float]  # memory in activations of one microbatch on a full rank, idle share

_HUES = list(HUES.values())
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

    Args:
        planned: (memory limit, idle share) of each plan, with the name of a schedule that is as
            good; empty where it beats all.
        named: (most memory, idle share) by name; names at one place share it.
        path: where to write, as PNG or SVG by its suffix.
        title: heads the picture.
        share: the figure that is drawn, "bubble" or "idle GPU time".

    Raises:
        ImportError: matplotlib is not installed; the message tells how.
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
    _label(figure, axes, labels, list(_along(sorted(planned))))
    figure.savefig(path, dpi=130)


def _along(line: Sequence[Place]) -> Iterator[Place]:
    """Return places on the line of plans, close enough that no label fits between them."""
    yield from line
    for (x, y), (right, above) in itertools.pairwise(line):
        for step in range(1, _STEPS):
            share = step / _STEPS
            yield x + share * (right - x), y + share * (above - y)


def _label(figure: Figure, axes: Axes, labels: Mapping[Place, str], line: Sequence[Place]) -> None:
    figure.draw_without_rendering()  # so that all has its place
    frame, legend = axes.get_window_extent(), axes.get_legend()
    taken = [_around(axes, place) for place in (*labels, *line)]
    taken += [legend.get_window_extent()] if legend is not None else []
    for place, text in sorted(labels.items(), key=lambda entry: (entry[0][1], entry[0][0])):
        free = [at for at in _places(axes, place, text) if _free(at.box, frame, taken)]
        clear = (at for at in free if _clear(at.leader, taken))
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
    inside = frame.containsx(box.x0) and frame.containsx(box.x1)
    inside = inside and frame.containsy(box.y0) and frame.containsy(box.y1)
    return inside and not any(map(box.overlaps, taken))


def _clear(leader: Sequence[tuple[float, float]], taken: Sequence[Bbox]) -> bool:
    return not any(other.contains(*place) for other in taken for place in leader)


def _around(axes: Axes, place: Place) -> Bbox:
    """Return the box of a mark on the canvas."""
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform(place)
    half = 4 * axes.figure.dpi / 72
    return Bbox.from_extents(x - half, y - half, x + half, y + half)
