"""What PipeOffload's authors measured beside what our simulator predicts.

Wan et al., PipeOffload, arXiv 2503.01328: A100s of 80 GB, pipelines alone. The absolute numbers are
of their machines; the ratios within a row are compared: each schedule to GIS-H, which runs where
most others do not fit. Predicted with stages that are alike and F, B and W that take equally long,
from the ratio k that they print: a copy both ways to F, B and W together. Theirs differ at long
sequences, and their first and last stage have one layer fewer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from benchmarks.paper.page import table
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.offload import po_f, po_h

SCHEDULES = 'interleaved', 'gis', 'gis-h', 'po-h', 'po-f', '1f1b'
BASE = 'gis-h'
LABELS = dict(zip(SCHEDULES, ('1F1B-I', 'GIS', 'GIS-H', 'PO-H', 'PO-F', '1F1B'), strict=True))


class Model(NamedTuple):
    """A model and its pipeline."""

    name: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int


class Row(NamedTuple):
    """One length of sequences; None where memory did not suffice or they left it out.

    Attributes:
        tokens: of a sequence, in thousands.
        ratio: k.
        utilisation: MFU in percent, in the order of `SCHEDULES`.
        memory: of activations, in GB.
    """

    tokens: int
    ratio: float
    utilisation: tuple[int | None, ...]
    memory: tuple[int | None, ...]


_ = None
PUBLISHED = {
    Model('10.5B', 8, 64, 5): (
        Row(4, 1.4, (65, 65, 63, 59, _, 57), (15, 13, 8, 3, _, 12)),
        Row(8, 1.2, (68, 68, 65, 61, _, 59), (30, 27, 16, 6, _, 24)),
        Row(16, 1.0, (_, _, 68, 63, 59, 62), (_, _, 32, 12, 9, 48)),
    ),
    Model('18.1B', 16, 128, 3): (
        Row(4, 1.2, (64, 65, 63, 59, _, 56), (24, 19, 13, 4, _, 18)),
        Row(8, 1.1, (66, 67, 66, 62, _, 58), (49, 38, 25, 8, _, 37)),
        Row(16, 0.9, (_, _, 59, 64, 61, _), (_, _, 51, 15, 9, _)),
    ),
    Model('42.9B', 32, 256, 2): (
        Row(4, 0.9, (63, 65, 64, 62, 58, 55), (49, 34, 25, 10, 5, 33)),
        Row(8, 0.8, (_, _, 62, 63, 60, _), (_, _, 51, 20, 8, _)),
    ),
}


class Prediction(NamedTuple):
    """Of one iteration: its time, and the most activations of a rank."""

    time: float
    memory: float


@lru_cache
def predict(name: str, model: Model, ratio: float) -> Prediction:
    """Simulate a schedule of the model's pipeline; without copies it is the same for all ratios."""
    if ratio and name not in ('po-h', 'po-f'):
        return predict(name, model, 0.0)
    schedule, costs = _made(name, model, ratio)
    return Prediction(simulate(schedule, costs).makespan, max(peak(schedule, costs)))


def _made(name: str, model: Model, ratio: float) -> tuple[Schedule, Costs]:
    p, m = model.num_ranks, model.num_microbatches
    if name == '1f1b':
        return build(name, p, m), Costs.uniform(Placement.loop(p))
    costs = Costs.uniform(Placement.loop(p, model.num_chunks))
    if not ratio:
        return build(name, p, m, num_chunks=model.num_chunks), costs
    costs = with_copies(costs, ratio)
    return {'po-h': po_h, 'po-f': po_f}[name](p, m, model.num_chunks, costs), costs


def section(model: Model) -> str:
    """Return the table of a model as Markdown."""
    others = [name for name in SCHEDULES if name != BASE]
    heads = ['tokens', 'k', *(f'{LABELS[name]}{what}' for name in others for what in ('', ' GB'))]
    lines: list[list[object]] = []
    for row in PUBLISHED[model]:
        cells: list[object] = [f'{row.tokens}k', row.ratio]
        base = SCHEDULES.index(BASE)
        expected = predict(BASE, model, row.ratio)
        for name in others:
            at = SCHEDULES.index(name)
            found = predict(name, model, row.ratio)
            faster = expected.time / found.time, found.memory / expected.memory
            for measured, predicted in zip((row.utilisation, row.memory), faster, strict=True):
                own, of_base = measured[at], measured[base]
                assert of_base is not None
                cells.append('' if own is None else f'{own / of_base:.2f}/{predicted:.2f}')
        lines.append(cells)
    title = f'{model.name}: {model.num_ranks} GPUs, {model.num_microbatches} microbatches'
    return f'### {title}, {model.num_chunks} chunks\n\n{table(heads, lines)}\n'


def page() -> str:
    """Return the tables of all models."""
    return '\n'.join(map(section, PUBLISHED))
