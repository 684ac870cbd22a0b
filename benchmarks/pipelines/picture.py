"""The comparison as a bar chart, by matplotlib (an extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.pipelines.table import Row
from megatron_zbpp.ir import KINDS
from megatron_zbpp.render.colours import colour

_TITLES = {
    'megatron': 'Megatron-Core',
    'torch': 'torch.distributed.pipelining',
    'zbpp': 'megatron_zbpp',
}


def require_matplotlib() -> None:
    """Return if pictures can be drawn.

    Raises:
        ImportError: matplotlib is not installed; the message tells how.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install megatron_zbpp[plot]') from error


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of the median iteration, fastest on top; a mark where the simulator expects it.

    Args:
        rows: of one run.
        path: where to write, as PNG or SVG by its suffix.
    """
    from matplotlib.figure import Figure

    shown = sorted(rows, key=lambda row: row['median_ms'])
    places = range(len(shown))
    figure = Figure((9.0, 1.4 + 0.28 * len(shown)), layout='constrained')
    axes = figure.subplots()
    fills = dict(zip(_TITLES, map(colour, KINDS), strict=False))
    for runner, title in _TITLES.items():
        own = [(at, row['median_ms']) for at, row in enumerate(shown) if row['runner'] == runner]
        if own:
            axes.barh(*zip(*own, strict=True), color=fills[runner], label=title)
    simulated = [row['simulated_ms'] for row in shown]
    axes.plot(simulated, places, '|', color='black', ms=11, label='simulated')
    first = shown[0]
    ideal = first['m'] * sum(first['times_ms'])
    axes.axvline(ideal, color='black', lw=0.8, ls=':', label='no bubble')
    axes.set_yticks(places, [row['schedule'] for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0.85 * ideal, None)
    axes.set_xlabel('ms per iteration (the axis does not start at 0)')
    times = ', '.join(f'{t:g}' for t in first['times_ms'])
    axes.set_title(f'p = {first["p"]}, m = {first["m"]}; F, B, W = {times} ms, emulated')
    axes.legend(loc='upper right', fontsize=8)  # where bars are short
    axes.spines[['top', 'right']].set_visible(False)
    figure.savefig(path, dpi=130)
