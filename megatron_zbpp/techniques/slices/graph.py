"""WHAT slices of a sequence make of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import DEVICE, KV, KV_GRADIENT, B, F, Graph, Hold, Need, Task, chain
from megatron_zbpp.ir.techniques import applied, made_of
from megatron_zbpp.techniques.slices.sizes import Attention, in_parts


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


_BACK = 7 / 4
"""Tensors of a block's backward, Q, K, V, dO and dQ, dK, dV, over Q, K, V and O of its forward."""


class Move(NamedTuple):
    """A block that another rank computes: queries of slice `query`, keys of slice `key`."""

    query: int
    key: int
    source: int
    target: int


class Load(NamedTuple):
    """Blocks that a rank computes for a slice, and those that it sends or is sent."""

    blocks: float
    moved: int


def moves(running: tuple[int, ...]) -> tuple[Move, ...]:
    """Return the blocks that move while rank r runs slice `running[r]`.

    >>> moves((3, 2, 1, 0))
    (Move(query=3, key=0, source=0, target=3),)
    """
    loads = [part + 0.5 for part in running]
    given = [0] * len(running)
    found = list[Move]()
    while max(loads) - min(loads) > 1:
        source, target = loads.index(max(loads)), loads.index(min(loads))
        found.append(Move(running[source], given[source], source, target))
        given[source] += 1
        loads[source] -= 1
        loads[target] += 1
    return tuple(found)


def loads(num_ranks: int, slices: int) -> list[list[Load]]:
    """Return what each rank computes while it runs each slice, in a full pipeline."""
    found = [[Load(0.0, 0)] * slices for _ in range(num_ranks)]
    for tick in range(slices):
        running = tuple((tick - rank) % slices for rank in range(num_ranks))
        exchanged = moves(running)
        for rank, part in enumerate(running):
            out = sum(move.source == rank for move in exchanged)
            into = sum(move.target == rank for move in exchanged)
            found[rank][part] = Load(part + 0.5 - out + into, out + into)
    return found


def exchanged(
    costs: Costs, placement: Placement, slices: int, attention: Attention, wire: float = 0.0
) -> Costs:
    """Return costs of equal slices whose attention ranks even out.

    Args:
        costs: of whole sequences.
        placement: of the stages, on one route.
        slices: n.
        attention: what F is made of.
        wire: time that a pass waits for a block that moves: Q, K and V there, O back. Of a backward
            it is 7/4 as much.
    """
    plain = in_parts(costs, (1,) * slices, attention)
    found, whole = loads(placement.num_ranks, slices), slices**2 / 2
    parts = dict[str, list[tuple[float, ...]]]()
    for kind, times in ((F, 1.0), (B, _BACK)):
        fixed, linear, pairs = attention.of(kind)
        for stage, time in enumerate(costs.times[kind]):
            wait = wire * times / time if time else 0.0
            own = found[placement.only_route[stage]]
            parts.setdefault(kind, []).append(
                tuple(
                    fixed + linear / slices + pairs * load.blocks / whole + wait * load.moved
                    for load in own
                )
            )
    return plain.with_parts(**parts)
