"""WHAT slices of a sequence make of a graph."""

from __future__ import annotations

from typing import NamedTuple

from megatron_zbpp.ir.graph import B, F, Graph, Hold, Need, Task, chain
from megatron_zbpp.ir.techniques import applied, made_of


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


class Slicing(NamedTuple):
    """Makes the graph of a plain pipeline whose sequences are sliced, for any number of stages."""

    slices: int

    def __call__(self, num_stages: int) -> Graph:
        return sliced(chain(num_stages), self.slices)


def of_one_slice(graph: Graph) -> Graph:
    """Return the graph of what each slice goes through: that of which `sliced` made this one."""
    if graph.num_slices == 1:
        return graph
    others = [each for each in graph.techniques if each.name != sliced.__name__]
    return applied(graph.num_stages, others)
