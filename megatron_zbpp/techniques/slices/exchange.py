"""Context exchange: ranks even out the attention of the equal slices that they run at one time.

(SlimPipe, arXiv 2504.14519; its text names the idea, the plan here is ours.) Slice i of a causal
sequence attends to i blocks of tokens before it and to half of its own. While a pipeline is full
its p ranks run p slices in a row, each another one. So whole blocks move, queries with keys and
values, from the rank that has most to the one that has least, until no two differ by more than one;
what they give comes back. The pairs of all ranks are known before, and repeat every n units.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_zbpp.ir import B, F, Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.slices.balance import Attention, in_parts

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
