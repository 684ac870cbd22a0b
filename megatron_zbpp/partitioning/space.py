"""The space of a search: the question that a partition answers, and all possible answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, permutations
from math import comb, inf

from megatron_zbpp.ir import B, Placement, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.layout import layers_per_stage
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import DECODER, LOSS, MTP, Layers
from megatron_zbpp.partitioning.stages import Partition, fits, memory_limits, stage_costs
from megatron_zbpp.planner.limits import same_limits
from megatron_zbpp.planner.problem import Problem

OBJECTIVES = ('makespan', 'window', 'period')
MOST_ORDERS = 5040  # orders of devices that are listed: those of 7


@dataclass(frozen=True)
class Space:
    """A model, devices, and what is free.

    Attributes:
        layers: of the model.
        devices: as many as pipeline ranks.
        num_microbatches: m.
        placements: that may be used.
        limits: most that each device may hold, parameters included.
        objective: 'makespan', 'window', or 'period', the time of the busiest rank.
        fused: whether the backward cannot be split.
        keep_order: whether device r is rank r.
    """

    layers: Layers
    devices: Devices
    num_microbatches: int
    placements: tuple[Placement, ...]
    limits: tuple[float, ...]
    objective: str = 'makespan'
    fused: bool = False
    keep_order: bool = False

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
        """Return what its stages cost; W within B where the backward cannot be split."""
        costs = stage_costs(self.layers, self.devices, partition)
        return fused_costs(costs) if self.fused else costs

    def problem(self, partition: Partition) -> Problem | None:
        """Return what is to be planned on it; None: a microbatch does not fit its memory."""
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
