"""The GPT benchmark as a picture, by matplotlib (an extra): measured bars, predicted curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpt.jobs import MEGATRON, STAGE
from benchmarks.gpt.results import MEASURED, PREDICTED, title
from benchmarks.gpt.worker import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 8  # curves: the best, and those that Megatron has
_ALWAYS = ('1f1b', 'interleaved')


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel for each model, measured above predicted.

    Args:
        rows: of one result.
        path: where to write, as PNG or SVG by its suffix.

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.figure import Figure

    panels = [
        (kind, model, own)
        for kind in (MEASURED, PREDICTED)
        for model in dict.fromkeys(row['model'] for row in rows)
        if (own := [r for r in rows if (r['kind'], r['model']) == (kind, model)])
        and own[0]['schedule'] != STAGE
    ]
    if not panels:
        raise ValueError('no configuration has a result: there is nothing to draw')
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure((6.0 * columns, 4.2 * lines), layout='constrained')
    axes = figure.subplots(lines, columns, squeeze=False)
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    for place, (kind, model, own) in zip(axes.flat, panels, strict=False):
        (_bars if kind == MEASURED else _curves)(place, own)
        place.set_title(f'{model}, {kind}', fontsize=10)
        place.spines[['top', 'right']].set_visible(False)
    figure.suptitle(rows[0]['device'])
    figure.savefig(path, dpi=130)


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    shown = sorted(rows, key=lambda row: row['tokens_per_second_per_gpu'])
    speeds = [row['tokens_per_second_per_gpu'] for row in shown]
    colours = ['tab:gray' if row['runner'] == MEGATRON else 'tab:blue' for row in shown]
    axes.barh(range(len(shown)), speeds, color=colours)
    names = [f'{title(row)} p={row["p"]} m={row["m"]}' for row in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_xlabel('tokens/s/GPU')


def _curves(axes: Axes, rows: Sequence[Row]) -> None:
    """TFLOP/s by number of ranks, which also make the model deeper; dashed: it was not measured."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: row['p']):
        point = row['p'], row['tflops_per_gpu']
        curves.setdefault(title(row), []).append(point)
    best = sorted(curves, key=lambda name: -curves[name][-1][1])
    kept = [name for name in _ALWAYS if name in curves] + best
    for name in list(dict.fromkeys(kept))[:_SHOWN]:
        axes.plot(*zip(*curves[name], strict=True), '--', marker='.', label=name)
    axes.set_xscale('log', base=2)
    axes.set_xlabel('pipeline ranks')
    axes.set_ylabel('TFLOP/s/GPU, predicted')
    axes.legend(fontsize=7)
