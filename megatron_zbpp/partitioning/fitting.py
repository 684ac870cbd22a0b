"""Costs of layers from measured times of stages: stage time = sum of its layers + a constant.

Least squares over the kinds of layers, none below 0, F, B and W each by itself. Several measured
layouts may be fitted together; what they cannot tell apart counts as far as it can to the kind of
which there are most layers: of `Ett|ttL` the embedding takes only what the second stage lacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_zbpp.analysis.least_squares import non_negative
from megatron_zbpp.ir import B, F, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.layers import KINDS, Layer, Layers

_TIMED = {'forward': F, 'backward': B, 'weight': W}  # fields of a layer, by kind
_CONSTANT = ''  # the kind of what each stage takes whatever its layers


def fit_layers(
    measured: Sequence[tuple[str, Costs]],
    constant: bool = False,
    factors: Sequence[float] | None = None,
) -> tuple[Layers, float]:
    """Return the layers of the first layout, and the largest error of a stage, as a share.

    Args:
        measured: layouts such as `Ett|tt|ttL`, each with times of its stages.
        constant: whether each stage may take a time of its own; else its layers take all.
        factors: by which the rank of each stage, of all layouts in turn, multiplies times; default:
            ranks are alike.

    Raises:
        ValueError: a layout has a letter of no layer, other stages than its costs, or other layers
            than the first.
    """
    layouts = [text.split('|') for text, _ in measured]
    for (text, costs), stages in zip(measured, layouts, strict=True):
        unknown = ''.join(sorted({*text} - KINDS - {'|'}))
        if unknown or not text.strip('|'):
            raise ValueError(
                f'layout {text!r} has {unknown or "nothing"} for layers: give such as Ett|ttL, or '
                "letters of a hybrid model's pattern"
            )
        if len(stages) != costs.num_stages:
            raise ValueError(
                f'layout {text} has {len(stages)} stages, its times {costs.num_stages}: give '
                'one entry per stage'
            )
        if ''.join(stages) != ''.join(layouts[0]):
            raise ValueError(f'layout {text} has other layers than {measured[0][0]}')
    counts = Counter(''.join(layouts[0]))
    kinds = sorted(counts, key=lambda kind: (-counts[kind], kind)) + [_CONSTANT] * constant
    rows = [
        [float(stage.count(kind)) if kind else 1.0 for kind in kinds]
        for stages in layouts
        for stage in stages
    ]
    found: dict[str, dict[str, float]] = {}
    error = 0.0
    for name in (*_TIMED, 'activation', 'retained', 'parameters'):
        values = [value for _, costs in measured for value in _values(costs, name)]
        timed = name in _TIMED
        own = _times_each(rows, factors) if timed and factors else rows
        solved = non_negative(own, values)
        found[name] = dict(zip(kinds, solved, strict=True))
        if timed:
            error = max(error, _error(own, values, solved))
    made = [
        Layer(kind, **{name: each[kind] for name, each in found.items()})
        for kind in ''.join(layouts[0])
    ]
    return Layers(tuple(made)), error


def _values(costs: Costs, name: str) -> Sequence[float]:
    """Return the entries of a field of `Layer`, by stage."""
    if name in _TIMED:
        return costs.times[_TIMED[name]]
    return costs.parameters if name == 'parameters' else costs.amounts[name]


def _times_each(rows: Sequence[Sequence[float]], factors: Sequence[float]) -> list[list[float]]:
    return [[x * factor for x in row] for row, factor in zip(rows, factors, strict=True)]


def _error(
    rows: Sequence[Sequence[float]], values: Sequence[float], solved: Sequence[float]
) -> float:
    """Return the largest error, as a share of the largest value."""
    scale = max(values, default=0.0) or 1.0
    return max(
        abs(sum(x * y for x, y in zip(row, solved, strict=True)) - value) / scale
        for row, value in zip(rows, values, strict=True)
    )
