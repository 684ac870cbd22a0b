"""WHAT slices of a sequence make of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_zbpp.ir.graph import DEVICE, KV, KV_GRADIENT, B, F, Graph, Hold, Need, Task, chain
from megatron_zbpp.ir.techniques import applied, made_of


def sliced(graph: Graph, slices: int, sizes: Sequence[int] = ()) -> Graph:
    """Each sequence is cut into slices (Seq1F1B, arXiv 2406.03488).

    F of a slice needs that of the slice before (its keys and values), B that of the slice behind
    (their gradients). Keys and values of all slices are held from the first F on, their gradients
    from the first B on, which is of the last slice; B of the first slice gives both back.

    Args:
        graph: of whole sequences.
        slices: n.
        sizes: tokens of each; none: that is not said.
    """
    sizes = tuple(sizes)
    if slices < 1:
        raise ValueError(f'{slices} slices: give at least 1')
    if sizes and (len(sizes) != slices or min(sizes) < 1):
        raise ValueError(
            f'sizes {", ".join(map(str, sizes))} of {slices} slices: give the tokens of each'
        )
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
            needs[own] = tuple(new)
            holds[own] = graph.holds[task] + (_keys_and_values(own, slices) if slices > 1 else ())
    return made_of(graph, 'sliced', (slices, sizes) if sizes else (slices,), needs, holds, {})


def _keys_and_values(task: Task, slices: int) -> tuple[Hold, ...]:
    changes = {
        (F, 0): {KV: slices},
        (B, slices - 1): {KV_GRADIENT: slices},
        (B, 0): {KV: -slices, KV_GRADIENT: -slices},
    }
    found = changes.get((task.kind, task.slice), {})
    return tuple(Hold(DEVICE, name, count) for name, count in found.items())


def exchanging_context(graph: Graph) -> Graph:
    """Say that ranks even out the attention of equal slices: see `exchange`, which has the plan.

    What travels for it begins and ends within one forward or backward, so tasks and their needs
    stay. (SlimPipe, arXiv 2504.14519.)
    """
    return made_of(graph, 'exchanging_context', (), graph.needs, graph.holds, {})


class Slicing(NamedTuple):
    """Makes the graph of a plain pipeline whose sequences are sliced, for any number of stages."""

    slices: int
    sizes: tuple[int, ...] = ()

    def __call__(self, num_stages: int) -> Graph:
        return sliced(chain(num_stages), self.slices, self.sizes)


def of_one_slice(graph: Graph) -> Graph:
    """Return the graph of what each slice goes through: that of which `sliced` made this one."""
    if graph.num_slices == 1:
        return graph
    cut = sliced.__name__, exchanging_context.__name__
    others = [each for each in graph.techniques if each.name not in cut]
    return applied(graph.num_stages, others)


def sized(graph: Graph, sizes: Sequence[int]) -> Graph:
    """Return a graph of slices that says how many tokens each of them has."""
    cut = sliced.__name__, (graph.num_slices, tuple(sizes))
    steps = [cut if step.name == sliced.__name__ else step for step in graph.techniques]
    return applied(graph.num_stages, steps)
