"""The comparison as a picture, by matplotlib (an extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.pipelines.table import Row
from megatron_zbpp.ir import KINDS
from megatron_zbpp.render.scene import colour

_TITLES = {
    'megatron': 'Megatron-Core',
    'torch': 'torch.distributed.pipelining',
    'zbpp': 'megatron_zbpp',
}


_SHORT = {'megatron': 'Megatron', 'torch': 'torch', 'zbpp': 'ours'}
_SHAPES = {'megatron': 's', 'torch': '^', 'zbpp': 'o'}


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
    """Draw a dot for each median iteration, fastest on top; a mark where the simulator expects it.

    Dots, as the axis does not start at 0; each runner has a shape, and its name beside the
    schedule's.

    Args:
        rows: of one run.
        path: where to write, as PNG or SVG by its suffix.
    """
    from matplotlib.figure import Figure

    shown = sorted(rows, key=lambda row: row['median_ms'])
    figure = Figure((9.0, 1.4 + 0.28 * len(shown)), layout='constrained')
    axes = figure.subplots()
    fills = dict(zip(_TITLES, map(colour, KINDS), strict=False))
    for runner, title in _TITLES.items():
        own = [(at, row['median_ms']) for at, row in enumerate(shown) if row['runner'] == runner]
        if own:
            places, times = zip(*own, strict=True)
            axes.plot(times, places, _SHAPES[runner], color=fills[runner], ms=7, label=title)
    simulated = [row['simulated_ms'] for row in shown]
    axes.plot(simulated, range(len(shown)), '|', color='black', ms=11, label='simulated')
    first = shown[0]
    ideal = first['m'] * sum(first['times_ms'])
    axes.axvline(ideal, color='black', lw=0.8, ls=':', label='no bubble')
    names = [f'{row["schedule"]}  ({_SHORT[row["runner"]]})' for row in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.grid(axis='y', alpha=0.3)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0.97 * ideal, None)
    axes.set_xlabel('ms per iteration (the axis does not start at 0)')
    times = ', '.join(f'{t:g}' for t in first['times_ms'])
    axes.set_title(f'p = {first["p"]}, m = {first["m"]}; F, B, W = {times} ms, emulated')
    axes.legend(loc='upper right', fontsize=8)  # where bars are short
    axes.spines[['top', 'right']].set_visible(False)
    figure.savefig(path, dpi=130)
