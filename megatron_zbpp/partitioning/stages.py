"""A partition: which layers, on which placement, on which devices; and what its stages cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import Layers


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

    Where two ranks exchange messages of several stages, the largest counts for all.

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
        edges=_edges(layers, devices, partition),
    )


def _edges(
    layers: Layers, devices: Devices, partition: Partition
) -> tuple[tuple[int, int, float], ...]:
    """Return the latencies between ranks that hold neighbouring stages, both ways."""
    ranks, order = partition.placement.only_route, partition.order
    found: dict[tuple[int, int], float] = {}
    at = 0
    for stage, count in enumerate(partition.cuts[:-1]):
        at += count
        pair = ranks[stage], ranks[stage + 1]
        output = layers.layers[at - 1].output
        for a, b in (pair, pair[::-1]):
            edge = devices.edge(order[a], order[b], output)
            if edge:
                found[a, b] = max(edge, found.get((a, b), 0.0))
    return tuple((a, b, edge) for (a, b), edge in sorted(found.items()))


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
    """Return the most activations of each rank: its own limit, and what parameters leave.

    Args:
        layers: of the model.
        devices: whose memory holds parameters and activations.
        partition: what is where.
        limits: of activations alone, by device; inf for none.
    """
    return tuple(
        min(limits[device], max(devices.devices[device].memory - taken, -1.0))
        if devices.devices[device].memory < inf
        else limits[device]
        for device, taken in zip(partition.order, parameters_held(layers, partition), strict=True)
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
