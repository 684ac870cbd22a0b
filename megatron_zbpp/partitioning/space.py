"""Partitions of a model's layers into stages, the costs of these, and the space of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, permutations
from math import comb, inf

from megatron_zbpp.ir import B, Placement, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import BYTES, MANY, Units
from megatron_zbpp.ir.placement import layers_per_stage
from megatron_zbpp.partitioning.layers import DECODER, MTP, Devices, Layers
from megatron_zbpp.planner.cost_sources import CostSource, Naming
from megatron_zbpp.planner.limits import Bytes, Limit, least_limits, same_limits
from megatron_zbpp.planner.problem import Problem


@dataclass(frozen=True)
class Partition:
    """Stages, their layers, and their devices."""

    placement: Placement  # which rank holds which stage
    cuts: tuple[int, ...]  # layers of each stage in model order, at least one each
    order: tuple[int, ...]  # the device of each rank


def stage_costs(layers: Layers, devices: Devices, partition: Partition) -> Costs:
    """Return the costs of the stages of `partition` on the devices that it numbers."""
    held = layers.stages(partition.cuts)
    ranks, order = partition.placement.only_route, partition.order
    times: list[tuple[float, ...]] = []
    for own, rank in zip(held, ranks, strict=True):
        sums = [sum(getattr(x, name) for x in own) for name in ('forward', 'backward', 'weight')]
        factors = devices.devices[order[rank]].factors
        times.append(tuple(time * factor for time, factor in zip(sums, factors, strict=True)))
    edges: dict[tuple[int, int], float] = {}
    hops: list[tuple[float, ...]] = []
    for own, pair in zip(held, pairwise(ranks), strict=False):
        both: list[float] = []
        for a, b in (pair, pair[::-1]):
            edges[a, b] = latency = devices.edge(order[a], order[b], 0.0)
            both.append(devices.edge(order[a], order[b], own[-1].output) - latency)
        hops.append(tuple(both))
    forward, backward, weight = zip(*times, strict=True)
    return Costs.of(
        forward,
        backward,
        weight,
        activation=tuple(sum(x.activation for x in own) for own in held),
        retained=tuple(sum(x.retained or 0.0 for x in own) for own in held),
        edges=tuple((a, b, latency) for (a, b), latency in sorted(edges.items()) if latency),
        hops=hops if any(map(any, hops)) else (),
    )


def parameters_held(layers: Layers, partition: Partition) -> tuple[float, ...]:
    """Return the memory of parameters on each rank."""
    static = [0.0] * partition.placement.num_ranks
    ranks = partition.placement.only_route
    for own, rank in zip(layers.stages(partition.cuts), ranks, strict=True):
        static[rank] += sum(layer.parameters for layer in own)
    return tuple(static)


def cuts_near(
    layers: Layers, wanted: Sequence[float], place: Callable[[int], float]
) -> tuple[int, ...]:
    """Return cuts at splits whose places are near the wanted ones; each stage has a layer."""
    splits, at = sorted(layers.splits()), 0
    ends: list[int] = []
    for stage, position in enumerate(wanted):
        most = len(splits) - (len(wanted) - stage)
        near = min(range(at, most + 1), key=lambda i: abs(place(splits[i]) - position))
        ends.append(splits[near])
        at = near + 1
    return tuple(b - a for a, b in pairwise((0, *ends, len(layers))))


OBJECTIVES = ('makespan', 'window', 'period')


@dataclass(frozen=True)
class Space:
    """A model, devices, and what is free."""

    layers: Layers  # of the model
    devices: Devices  # as many as pipeline ranks
    num_microbatches: int  # m
    placements: Sequence[Placement]  # that may be used: those with a layer for each stage stay
    memory_limit: Limit = None  # most that each device may hold, parameters included
    objective: str = 'makespan'  # 'makespan', 'window', or 'period', the time of the busiest rank
    fused: bool = False  # whether the backward cannot be split
    keep_order: bool = False  # whether device r is rank r

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f'{self.num_microbatches} microbatches: give at least 1')
        if self.objective not in OBJECTIVES:
            raise ValueError(
                f'objective {self.objective!r} is unknown: use {", ".join(OBJECTIVES)}'
            )
        items, count = len(self.layers.splits()) + 1, len(self.devices)
        for placement in self.placements:
            if placement.num_ranks != count:
                raise ValueError(f'{count} devices for {placement.num_ranks} ranks: give one each')
        possible = tuple(p for p in self.placements if p.num_stages <= items)
        if not possible:
            fewest = min(p.num_stages for p in self.placements)
            raise ValueError(
                f'{items} layers cannot be {fewest} stages: use fewer pipeline ranks or chunks'
            )
        object.__setattr__(self, 'placements', possible)
        _ = self.limits  # which must fit the devices

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """The limit of each device."""
        return same_limits(self.memory_limit, len(self.devices))

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
        if not (self.keep_order or len(self.devices) <= 7 or self.alike):
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
        """Return True if Megatron can have it: m in the last chunks of a loop, or with the loss."""
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

    def memory_limits(self, partition: Partition) -> tuple[float, ...]:
        """Return the most activations of each rank: its limit or memory less its parameters."""
        taken = parameters_held(self.layers, partition)
        return tuple(
            max(min(self.limits[device], self.devices.devices[device].memory) - own, -1.0)
            for device, own in zip(partition.order, taken, strict=True)
        )

    def problem(self, partition: Partition) -> Problem | None:
        """Return the planning problem of a partition; None: no microbatch fits its memory."""
        costs = self.costs(partition)
        limits = self.memory_limits(partition)
        least = least_limits(partition.placement, costs)
        if any(most < own * (1 - 1e-9) for most, own in zip(limits, least, strict=True)):
            return None
        objective = 'window' if self.objective == 'window' else 'makespan'
        return Problem(partition.placement, self.num_microbatches, costs, limits, objective)

    def balanced(self, placement: Placement, order: tuple[int, ...]) -> Partition:
        """Return stages of about equal time on the devices that they are on."""
        times = [layer.time for layer in self.layers]
        devices = [self.devices.devices[order[rank]] for rank in placement.only_route]
        speeds = [3 / sum(device.factors) for device in devices]
        total, share, prefix = sum(times), sum(speeds), [0.0, *accumulate(times)]
        wanted = [total * done / share for done in accumulate(speeds[:-1])]
        return Partition(placement, cuts_near(self.layers, wanted, lambda at: prefix[at]), order)

    def even(self, placement: Placement | None = None) -> Partition:
        """Return the split that Megatron makes if it counts embedding and loss as layers."""
        placement = placement or Placement.loop(len(self.devices))
        order = tuple(range(len(self.devices)))
        kinds = [layer.kind for layer in self.layers]
        if DECODER not in kinds:
            return Partition(placement, tuple(layers_per_stage(len(kinds), placement)), order)
        before, decoders = kinds.index(DECODER), kinds.count(DECODER)
        after = len(kinds) - before - decoders
        cuts = layers_per_stage(decoders, placement, bool(before), after)
        cuts[0] += before
        cuts[-1] += after
        return Partition(placement, tuple(cuts), order)


def fused_costs(costs: Costs) -> Costs:
    """Return costs under which B does all that BW does, and W nothing."""
    whole = tuple(b + w for b, w in zip(costs.times[B], costs.times[W], strict=True))
    fused = costs.with_times(B=whole, W=(0.0,) * costs.num_stages)
    return fused.with_amounts(retained=costs.amounts['activation'])


_UNIT = 'units of the layers'


@dataclass(frozen=True)
class LayerCosts(CostSource):
    """Layers of a model, split evenly on whatever placement."""

    layers: Layers
    file: str

    @property
    def heading(self) -> str:
        return 'layers from a file'

    @property
    def layers_file(self) -> str:
        return self.file

    @property
    def most_stages(self) -> int:
        return len(self.layers.splits()) + 1

    def costs(self, placement: Placement, name: Naming, selective: bool = False) -> Costs:
        even, devices = self._even(placement), Devices.alike(placement.num_ranks)
        parameters = tuple(
            sum(layer.parameters for layer in stage) for stage in self.layers.stages(even.cuts)
        )
        return replace(stage_costs(self.layers, devices, even), parameters=parameters)

    def units(self, in_bytes: bool) -> Units:
        return Units(_UNIT, BYTES if _held(self.layers) >= MANY else _UNIT)

    def require_bytes(self, name: Naming) -> None:
        require_bytes(self.layers, self.file, [Bytes()])

    def layout(self, placement: Placement) -> str:
        return self.layers.text(self._even(placement).cuts)

    def _even(self, placement: Placement) -> Partition:
        devices = Devices.alike(placement.num_ranks)
        return Space(self.layers, devices, 1, [placement]).even(placement)


def _held(layers: Layers) -> float:
    return sum(layer.activation + layer.parameters for layer in layers)


def require_bytes(layers: Layers, file: str, limits: Iterable[float | None]) -> None:
    """Raise ValueError for a limit in bytes on layers that have none."""
    if any(isinstance(limit, Bytes) for limit in limits) and _held(layers) < MANY:
        raise ValueError(
            f'a memory limit in bytes, but all layers of {file} hold {_held(layers):g}: give their '
            'activation and parameters in bytes, as zbpp profile writes them, or a limit in the '
            'unit of the file'
        )
