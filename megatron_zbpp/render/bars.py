"""The picture of a bench: a bar for each schedule, and a mark for each of its runs."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# (matplotlib leaves much of its keyword arguments open)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from megatron_zbpp.render.colours import HUES
from megatron_zbpp.render.png import fitted, new_figure


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
