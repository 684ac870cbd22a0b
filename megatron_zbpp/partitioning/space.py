"""Partitions of a model's layers into stages, the costs of these, and the space of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, permutations
from math import comb, inf
from typing import Any

from megatron_zbpp.ir import B, Placement, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.layout import layers_per_stage
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import DECODER, LOSS, MTP, Layer, Layers
from megatron_zbpp.planner.limits import same_limits
from megatron_zbpp.planner.problem import Problem


@dataclass(frozen=True)
class Partition:
    """Stages, their layers, and their devices."""

    placement: Placement  # which rank holds which stage
    cuts: tuple[int, ...]  # layers of each stage in model order, at least one each
    order: tuple[int, ...]  # the device of each rank


def stage_costs(layers: Layers, devices: Devices, partition: Partition) -> Costs:
    """Return the costs of the stages of `partition` on its devices.

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
    """Return the memory of parameters on each rank."""
    static = [0.0] * partition.placement.num_ranks
    ranks = partition.placement.only_route
    for own, rank in zip(layers.stages(partition.cuts), ranks, strict=True):
        static[rank] += sum(layer.parameters for layer in own)
    return tuple(static)


def memory_limits(
    layers: Layers, devices: Devices, partition: Partition, limits: Sequence[float]
) -> tuple[float, ...]:
    """Return the most activations of each rank: its limit or memory less its parameters."""
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


OBJECTIVES = ('makespan', 'window', 'period')
MOST_ORDERS = 5040  # orders of devices that are listed: those of 7


@dataclass(frozen=True)
class Space:
    """A model, devices, and what is free."""

    layers: Layers  # of the model
    devices: Devices  # as many as pipeline ranks
    num_microbatches: int  # m
    placements: tuple[Placement, ...]  # that may be used
    limits: tuple[float, ...]  # most that each device may hold, parameters included
    objective: str = 'makespan'  # 'makespan', 'window', or 'period', the time of the busiest rank
    fused: bool = False  # whether the backward cannot be split
    keep_order: bool = False  # whether device r is rank r

    @classmethod
    def of(
        cls,
        layers: Layers,
        devices: Devices,
        num_microbatches: int,
        placements: Sequence[Placement],
        memory_limit: float | Sequence[float] | None = None,
        objective: str = 'makespan',
        fused: bool = False,
        keep_order: bool = False,
    ) -> Space:
        """Return the space, checked.

        Raises:
            ValueError: no microbatch, an unknown objective, more ranks than layers, or limits that
                do not fit the devices.
        """
        if num_microbatches < 1:
            raise ValueError(f'{num_microbatches} microbatches: give at least 1')
        if objective not in OBJECTIVES:
            raise ValueError(f'objective {objective!r} is unknown: use {", ".join(OBJECTIVES)}')
        items = len(layers.splits()) + 1
        for placement in placements:
            if placement.num_ranks != len(devices):
                count = placement.num_ranks
                raise ValueError(f'{len(devices)} devices for {count} ranks: give one each')
        possible = tuple(p for p in placements if p.num_stages <= items)
        if not possible:
            fewest = min(p.num_stages for p in placements)
            raise ValueError(
                f'{items} layers cannot be {fewest} stages: use fewer pipeline ranks or chunks'
            )
        limits = same_limits(memory_limit, len(devices))
        return cls(
            layers, devices, num_microbatches, possible, limits, objective, fused, keep_order
        )

    @cached_property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """Orders of the devices that differ in anything; the given one alone if others are many."""
        given = tuple(range(len(self.devices)))
        if self.keep_order or len(given) > 7:
            return (given,)
        output = max(layer.output for layer in self.layers)
        found: dict[object, tuple[int, ...]] = {}
        for order in permutations(given):
            key = self.devices.signature(order, output), tuple(self.limits[d] for d in order)
            found.setdefault(key, order)
        return tuple(found.values())

    @property
    def orders_are_listed(self) -> bool:
        """True if `orders` are all that differ."""
        count = len(self.devices)
        return self.keep_order or count <= 7 or self.alike

    @cached_property
    def alike(self) -> bool:
        """True if all devices, limits and links are alike."""
        devices, ranks = self.devices, range(len(self.devices))
        output = max(layer.output for layer in self.layers)
        return (
            len({(devices.devices[r].factors, devices.devices[r].memory) for r in ranks}) == 1
            and len(set(self.limits)) == 1
            and len({devices.edge(a, b, output) for a in ranks for b in ranks if a != b}) <= 1
        )

    @property
    def size(self) -> float:
        """The number of partitions; inf where their orders are not listed."""
        if not self.orders_are_listed:
            return inf
        splits = len(self.layers.splits())
        return len(self.orders) * sum(comb(splits, p.num_stages - 1) for p in self.placements)

    def partitions(self) -> Iterator[Partition]:
        """Yield all of them."""
        splits, count = sorted(self.layers.splits()), len(self.layers)
        for placement in self.placements:
            for ends in combinations(splits, placement.num_stages - 1):
                cuts = tuple(b - a for a, b in pairwise((0, *ends, count)))
                for order in self.orders:
                    partition = Partition(placement, cuts, order)
                    if self.allowed(partition):
                        yield partition

    def allowed(self, partition: Partition) -> bool:
        """Return whether Megatron can have it: m in the last chunks of a loop, or with the loss."""
        if min(partition.cuts) < 1:
            return False
        kinds = [''.join(x.kind for x in own) for own in self.layers.stages(partition.cuts)]
        holders = [stage for stage, own in enumerate(kinds) if MTP in own]
        if len(holders) > 1:
            return False
        last, placement = partition.placement.num_stages - 1, partition.placement
        return not holders or (
            holders[0] == last or (placement.is_loop and holders[0] > last - placement.num_ranks)
        )

    def repaired(self, partition: Partition) -> Partition:
        """Return it; or, where Megatron cannot have it, the same with all m on the loss's stage."""
        kinds = [layer.kind for layer in self.layers]
        if MTP not in kinds or self.allowed(partition):
            return partition
        ends = [*accumulate(partition.cuts)][:-1]
        first, stages = kinds.index(MTP), len(ends)
        ends = [min(end, first - (stages - 1 - at)) for at, end in enumerate(ends)]
        cuts = tuple(b - a for a, b in pairwise((0, *ends, len(kinds))))
        return replace(partition, cuts=cuts)

    def costs(self, partition: Partition) -> Costs:
        """Return the costs of its stages; W within B where the backward cannot be split."""
        costs = stage_costs(self.layers, self.devices, partition)
        return fused_costs(costs) if self.fused else costs

    def problem(self, partition: Partition) -> Problem | None:
        """Return the planning problem of a partition; None: no microbatch fits its memory."""
        costs = self.costs(partition)
        limits = memory_limits(self.layers, self.devices, partition, self.limits)
        if not fits(costs, partition.placement, limits):
            return None
        objective = 'window' if self.objective == 'window' else 'makespan'
        return Problem(partition.placement, self.num_microbatches, costs, limits, objective)

    def balanced(self, placement: Placement, order: tuple[int, ...]) -> Partition:
        """Return stages of about equal time on the devices that they are on."""
        times = [layer.time for layer in self.layers]
        devices = [self.devices.devices[order[rank]] for rank in placement.only_route]
        speeds = [3 / sum(device.factors) for device in devices]
        splits = sorted(self.layers.splits())
        total, share, done, at = sum(times), sum(speeds), 0.0, 0
        ends: list[int] = []
        prefix = [0.0]
        for time in times:
            prefix.append(prefix[-1] + time)
        for stage, speed in enumerate(speeds[:-1]):
            done += speed
            most = len(splits) - (len(speeds) - 1 - stage)
            wanted = total * done / share
            near = min(range(at, most + 1), key=lambda i: abs(prefix[splits[i]] - wanted))
            ends.append(splits[near])
            at = near + 1
        marks = [0, *ends, len(times)]
        return Partition(placement, tuple(b - a for a, b in pairwise(marks)), order)

    def even(self, placement: Placement | None = None) -> Partition:
        """Return the split that Megatron makes if it counts embedding and loss as layers."""
        placement = placement or Placement.loop(len(self.devices))
        order = tuple(range(len(self.devices)))
        kinds = [layer.kind for layer in self.layers]
        if DECODER not in kinds:
            return Partition(placement, tuple(layers_per_stage(len(kinds), placement)), order)
        before = kinds.index(DECODER)
        decoders = kinds.count(DECODER)
        after = len(kinds) - before - decoders
        ends = bool(before), after
        if LOSS in kinds or after:
            cuts = layers_per_stage(decoders, placement, *ends)
        else:
            cuts = layers_per_stage(decoders, placement, bool(before))
        cuts[0] += before
        cuts[-1] += after
        return Partition(placement, tuple(cuts), order)


def fused_costs(costs: Costs) -> Costs:
    """Return costs under which B does all that BW does, and W nothing."""
    whole = tuple(b + w for b, w in zip(costs.times[B], costs.times[W], strict=True))
    fused = costs.with_times(B=whole, W=(0.0,) * costs.num_stages)
    return fused.with_amounts(retained=costs.amounts['activation'])
