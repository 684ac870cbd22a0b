"""A partition: which layers, on which placement, on which devices; and what its stages cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import Layer, Layers


@dataclass(frozen=True)
class Partition:
    """Stages, their layers, and their devices.

    Attributes:
        placement: which rank holds which stage.
        cuts: layers of each stage in model order, at least one each.
        order: the device of each rank.
    """

    placement: Placement
    cuts: tuple[int, ...]
    order: tuple[int, ...]


def stage_costs(layers: Layers, devices: Devices, partition: Partition) -> Costs:
    """Return what the stages of `partition` cost on its devices.

    Args:
        layers: of the model.
        devices: that `partition.order` numbers.
        partition: of as many stages as its placement has.
    """
    held = layers.stages(partition.cuts)
    ranks, order = partition.placement.only_route, partition.order
    times: list[tuple[float, ...]] = []
    for own, rank in zip(held, ranks, strict=True):
        sums = [sum(getattr(x, name) for x in own) for name in ('forward', 'backward', 'weight')]
        factors = devices.devices[order[rank]].factors
        times.append(tuple(time * factor for time, factor in zip(sums, factors, strict=True)))
    forward, backward, weight = zip(*times, strict=True)
    return Costs.of(
        forward,
        backward,
        weight,
        activation=tuple(sum(x.activation for x in own) for own in held),
        retained=tuple(sum(x.retained or 0.0 for x in own) for own in held),
        **_messages(held, devices, partition),
    )


def _messages(
    held: Sequence[Sequence[Layer]], devices: Devices, partition: Partition
) -> dict[str, Any]:
    order = partition.order
    edges: dict[tuple[int, int], float] = {}
    hops: list[tuple[float, ...]] = []
    for own, pair in zip(held, pairwise(partition.placement.only_route), strict=False):
        both: list[float] = []
        for a, b in (pair, pair[::-1]):
            edges[a, b] = latency = devices.edge(order[a], order[b], 0.0)
            both.append(devices.edge(order[a], order[b], own[-1].output) - latency)
        hops.append(tuple(both))
    found = tuple((a, b, latency) for (a, b), latency in sorted(edges.items()) if latency)
    return {'edges': found, 'hops': hops if any(map(any, hops)) else ()}


def parameters_held(layers: Layers, partition: Partition) -> tuple[float, ...]:
    """Return what parameters take on each rank."""
    static = [0.0] * partition.placement.num_ranks
    ranks = partition.placement.only_route
    for own, rank in zip(layers.stages(partition.cuts), ranks, strict=True):
        static[rank] += sum(layer.parameters for layer in own)
    return tuple(static)


def memory_limits(
    layers: Layers, devices: Devices, partition: Partition, limits: Sequence[float]
) -> tuple[float, ...]:
    """Return the most activations of each rank: what parameters leave of its limit and its memory.

    Args:
        layers: of the model.
        devices: whose memory holds parameters and activations.
        partition: what is where.
        limits: of both together, by device; inf for none.
    """
    taken = parameters_held(layers, partition)
    return tuple(
        max(min(limits[device], devices.devices[device].memory) - own, -1.0)
        for device, own in zip(partition.order, taken, strict=True)
    )


def fits(costs: Costs, placement: Placement, limits: Sequence[float]) -> bool:
    """Return whether each rank can hold a microbatch of all its stages, and the raise of its B."""
    activation, retained = costs.amounts['activation'], costs.amounts['retained']
    for rank, limit in enumerate(limits):
        own = placement.stages(rank)
        raised = max(0.0, *(retained[s] - activation[s] for s in own))
        if limit < (sum(activation[s] for s in own) + raised) * (1 - 1e-9):
            return False
    return True
