"""What is to run: the even split and better ones, and what the simulator says of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import B, F, Placement, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore.lowered import for_megatron
from megatron_zbpp.partitioning.layers import Device, Devices, Layer, Layers
from megatron_zbpp.partitioning.plans import PartitionPlan, partition
from megatron_zbpp.partitioning.space import Partition, stage_costs
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.vocabulary.graph import S, T
from megatron_zbpp.techniques.vocabulary.place import in_embedding_shards, in_shards

MEGATRON, ZBPP = 'megatron', 'zbpp'


@dataclass(frozen=True)
class Entry:
    """One of those that take turns.

    Attributes:
        runner: the library that runs it.
        name: for people.
        schedule: in Megatron's ranks.
        cuts: layers of each stage in model order.
        layout: the same, in the language of Megatron's flag.
        predicted: seconds of an iteration.
        shard: seconds of S and of T of each rank, where the output layer is on all of them.
    """

    runner: str
    name: str
    schedule: Schedule
    cuts: tuple[int, ...]
    layout: str
    predicted: float
    shard: tuple[float, float] | None = None

    @property
    def title(self) -> str:
        return f'{self.runner}:{self.name}'


def machines(
    num_ranks: int, slow: tuple[int, float] | None, hosts: int, bandwidth: float
) -> Devices:
    """Return the devices: one of them slower, or on two hosts whose link has a bandwidth.

    Args:
        num_ranks: p.
        slow: a rank, and how many times as long its passes take.
        hosts: 1 or 2; the first half of the ranks is on the first.
        bandwidth: between hosts, in units of the layers' output a second.
    """
    ranks = range(num_ranks)
    factors = [slow[1] if slow and slow[0] == rank else 1.0 for rank in ranks]
    devices = tuple(Device(str(r), (x, x, x)) for r, x in zip(ranks, factors, strict=True))
    if hosts == 1:
        return Devices(devices)
    side = [2 * rank // num_ranks for rank in ranks]
    rows = tuple(tuple(bandwidth * (side[a] != side[b]) for b in ranks) for a in ranks)
    return Devices(devices, bandwidth=rows)


@dataclass(frozen=True)
class Known:
    """What is known before anything is planned.

    Attributes:
        layers: in seconds.
        devices: in the order of the ranks, which stays.
    """

    layers: Layers
    devices: Devices


def entries(known: Known, m: int, seconds: float, fused: Known | None = None) -> list[Entry]:
    """Return the even split by stock 1F1B and by zb-v, the best for stock, and the best of all.

    Args:
        known: of layers and ranks.
        m: microbatches.
        seconds: to search in, for each.
        fused: the same of backwards that are not split, as stock's; default: what `known` says of B
            and W together.
    """
    fused = fused or known
    p = len(known.devices)
    equal = [even(fused, m, MEGATRON, '1f1b'), even(known, m, ZBPP, 'zb-v')]
    loop = [Placement.loop(p)]
    stock = partition(
        fused.layers, fused.devices, m, placements=loop, fused=True, schedules=['1f1b'],
        keep_order=True, seconds=seconds,
    )  # fmt: skip
    best = partition(known.layers, known.devices, m, keep_order=True, seconds=seconds)
    return [*equal, _planned(MEGATRON, '1f1b, best layout', stock), _planned(ZBPP, 'plan', best)]


def even(known: Known, m: int, runner: str, name: str) -> Entry:
    """Return a schedule with equal numbers of layers on its stages, run by a library."""
    layers, devices = known.layers, known.devices
    schedule = build(name, len(devices), m)
    placement = schedule.placement
    cuts = _evenly(layers, placement.num_stages)
    # what stands on rank r of a V is on device r of Megatron's, whose ranks are in reverse
    own = for_megatron(schedule)
    costs = stage_costs(layers, devices, Partition(own.placement, cuts, tuple(range(len(devices)))))
    timeline = simulate(own, costs)
    return Entry(runner, f'{name}, even', own, cuts, layers.text(cuts), timeline.makespan)


def sharded(known: Known, m: int, name: str, both: bool = False) -> Entry:
    """Return a schedule of ours with the output layer on all ranks, and the other layers even.

    S and T take an equal part of the output layer's time.

    Args:
        known: of layers and ranks.
        m: microbatches.
        name: of the schedule.
        both: whether the embedding is on all ranks, too.
    """
    *others, head = known.layers.layers
    trunk, p = Layers(tuple(others)), len(known.devices)
    host = for_megatron(build(name, p, m))
    cuts = _evenly(trunk, host.num_stages)
    partition = Partition(host.placement, cuts, tuple(range(p)))
    shard = ((head.forward + head.backward) / p, head.weight / p)
    times = {kind: [0.0, *[time] * p] for kind, time in zip((S, T), shard, strict=True)}
    costs = _with_sites(stage_costs(trunk, known.devices, partition), times, p)
    schedule = in_shards(host, costs)
    schedule = in_embedding_shards(schedule, costs) if both else schedule
    whole = *cuts[:-1], cuts[-1] + 1
    schedule = replace(schedule, costs=costs)
    makespan = simulate(schedule, costs).makespan
    layout = known.layers.text(whole)
    return Entry(ZBPP, f'{name}, shards', schedule, cuts, layout, makespan, shard)


def forecast(entry: Entry, known: Known, profiled: Costs) -> float:
    """Return the seconds of an iteration by what another schedule's passes take.

    Args:
        entry: that runs.
        known: of layers and ranks, as they fit that schedule's stages.
        profiled: of that schedule; of its shards and collectives, if `entry` has some.
    """
    ranks = tuple(range(len(known.devices)))
    cuts = tuple(map(len, entry.layout.split('|')))
    partition = Partition(entry.schedule.placement, cuts, ranks)
    costs = stage_costs(known.layers, known.devices, partition)
    if entry.shard is not None:
        times = {kind: own for kind, own in profiled.times.items() if kind not in (F, B, W)}
        costs = _with_sites(costs, times, len(ranks))
        costs = replace(costs, collectives=profiled.collectives)
    return simulate(entry.schedule, costs).makespan


def _with_sites(costs: Costs, times: Mapping[str, Sequence[float]], p: int) -> Costs:
    """Return the costs with times of sites: of the first stage, and of the `p` behind all."""
    between = (0.0,) * (costs.num_stages - 1)
    return costs.with_times(**{k: (own[0], *between, *own[-p:]) for k, own in times.items()})


def _evenly(layers: Layers, stages: int) -> tuple[int, ...]:
    """Return cuts with as many decoder layers in each, the ends beside them."""
    decoders = sum(layer.kind == 't' for layer in layers)
    counts = [decoders // stages + (k < decoders % stages) for k in range(stages)]
    counts[0] += layers.layers[0].kind != 't'
    counts[-1] += layers.layers[-1].kind != 't'
    return tuple(counts)


def _planned(runner: str, name: str, plan: PartitionPlan) -> Entry:
    schedule = for_megatron(plan.schedule)
    makespan = plan.timeline.makespan
    return Entry(runner, name, schedule, plan.cuts, plan.layout, makespan)


def scaled(layers: Layers, seconds: float, size: float) -> Layers:
    """Return the layers with times that come to so many seconds in all, and messages of a size."""
    factor = seconds / sum(layer.time for layer in layers)
    return Layers(
        tuple(
            Layer(
                each.kind,
                each.forward * factor,
                each.backward * factor,
                each.weight * factor,
                output=size,
            )
            for each in layers
        )
    )


def gpt(num_layers: int, head: float) -> Layers:
    """Return equal layers and a head that takes so many times one of them."""
    layer = Layer('t', 1.0, 1.0, 1.0)
    return Layers((Layer('E'), *[layer] * num_layers, Layer('L', head, head, head)))


def worst(found: Sequence[float], predicted: Sequence[float]) -> float:
    """Return the largest difference, as a share of what was found."""
    return max(abs(b / a - 1) for a, b in zip(found, predicted, strict=True))
