"""WHAT slices of a sequence make of a graph."""

from __future__ import annotations

from megatron_zbpp.ir.graph import B, F, Graph, Hold, Need, Task
from megatron_zbpp.ir.techniques import made_of


def sliced(graph: Graph, slices: int) -> Graph:
    """Each sequence is cut into slices (Seq1F1B, arXiv 2406.03488).

    F of a slice needs that of the slice before (its keys and values), B that of the slice behind
    (their gradients).
    """
    if slices < 1:
        raise ValueError(f'{slices} slices: give at least 1')
    if graph.num_slices > 1:
        raise ValueError('the graph is sliced already: slice it once')
    needs: dict[Task, tuple[Need, ...]] = {}
    holds: dict[Task, tuple[Hold, ...]] = {}
    for task, old in graph.needs.items():
        for part in range(slices):
            own = task._replace(slice=part)
            new = [need._replace(task=need.task._replace(slice=part)) for need in old]
            other = {F: part - 1, B: part + 1}.get(task.kind, -1)
            if 0 <= other < slices:
                new.append(Need(task._replace(slice=other)))
            needs[own], holds[own] = tuple(new), graph.holds[task]
    return made_of(graph, 'sliced', (slices,), needs, holds, {})
