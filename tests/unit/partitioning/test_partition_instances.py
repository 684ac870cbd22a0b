"""Partitions against optima that are known, and against all that there are."""

import random
import signal
from dataclasses import replace
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from figures import require_kept
from instances import INSTANCES, NODES, ONE_SLOW, P1, P4, P6, Instance, layers

from megatron_zbpp import (
    Device,
    Devices,
    Layer,
    Layers,
    PartitionPlan,
    Placement,
    check,
    partition,
    simulate,
)
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.partitioning.bounds import Bounds
from megatron_zbpp.partitioning.plans import PartitionInterrupted
from megatron_zbpp.partitioning.search import PartitionSearch, rank, swapped
from megatron_zbpp.partitioning.space import Partition, Space, stage_costs


def asked(name: str) -> tuple[Instance, dict]:
    instance = INSTANCES[name]
    devices = instance.devices
    p = devices if isinstance(devices, int) else len(devices)
    return instance, {'placements': [Placement.loop(p)]} | instance.more


def require_consistent(plan: PartitionPlan, limit: float | None) -> None:
    """What the plan says is what its schedule does."""
    require_kept(plan, limit)
    assert plan.peak_activations == tuple(peak(plan.schedule, plan.costs))
    stages = plan.schedule.placement.num_stages
    assert len(plan.cuts) == plan.layout.count('|') + 1 == stages
    assert tuple(map(len, plan.layout.split('|'))) == plan.cuts


# without planning before it every partition whose bound is below the best is solved to the end
PROVEN = [*((name, 5) for name in INSTANCES), ('P1', 0), ('P1m', 0), ('P2', 0), ('P6 loop', 0)]


@pytest.mark.parametrize(('name', 'seconds'), [*PROVEN, ('P6m V', 0)])
def test_split_optimum_is_proven(name, seconds):
    instance, more = asked(name)
    exact = {'exact': True, 'seconds': seconds}
    plan = partition(instance.layers, instance.devices, instance.m, **exact, **more)
    assert plan.value == plan.lower_bound == instance.split
    assert plan.cuts in instance.cuts
    require_consistent(plan, more.get('memory_limit'))


@pytest.mark.parametrize('name', [name for name, it in INSTANCES.items() if it.fused])
def test_best_1f1b(name):
    """Over every partition, and every order of devices."""
    instance, more = asked(name)
    plan = partition(
        instance.layers, instance.devices, instance.m, schedules=['1f1b'], exact=True, **more
    )
    assert plan.value == instance.fused and plan.schedule.name == '1f1b'
    assert plan.cuts in instance.cuts
    require_consistent(plan, more.get('memory_limit'))


@pytest.mark.full
@pytest.mark.parametrize('name', INSTANCES)
def test_near_the_optimum_without_a_proof(name):
    """Within one percent in 30 seconds."""
    instance, more = asked(name)
    plan = partition(instance.layers, instance.devices, instance.m, seconds=30, **more)
    assert instance.split <= plan.value <= 1.01 * instance.split


def test_a_proof_of_1f1b_with_memory_and_chunks():
    """Where partitions are few, each is simulated."""
    plan = partition(P1, 2, 4, schedules=['1f1b', 'interleaved'], exact=True)
    known = [
        partition(P1, 2, 4, schedules=[name], placements=[Placement.loop(2, chunks)]).value
        for name, chunks in (('1f1b', 1), ('interleaved', 2))
    ]
    assert plan.value == min(known)
    assert partition(P1, 4, 4, seconds=1, placements=[Placement.loop(4)]).even == 104
    p8 = INSTANCES['P8']
    assert partition(p8.layers, 4, 8, fused=True, placements=[Placement.loop(4)]).even == 603
    assert partition(P4, NODES, 4, keep_order=True, schedules=['1f1b']).value == 118
    # for asynchronous training: chains on chains
    plan = partition(P1, 4, 4, objective='period', placements=[Placement.loop(4)])
    assert plan.value == 4 * 14 == pytest.approx(plan.lower_bound)


@pytest.mark.parametrize(('m', 'whole', 'ahead'), [(4, 94, 92), (8, 164, 140), (16, 292, 236)])
def test_more_warm_up_hides_slow_links(m, whole, ahead):
    """As does 1f1b-pb, which `fused` may choose."""
    loop = {'placements': [Placement.loop(4)]}
    assert partition(P4, NODES, m, schedules=['1f1b'], **loop).value == whole
    best = partition(P4, NODES, m, fused=True, **loop)
    assert best.value == ahead and best.schedule.name == '1f1b-pb'


def test_placement_and_partition_are_searched_together():
    """A V puts both heavy ends on one rank; the loop of two chunks beats it and one chunk."""
    plan = partition(P6, 2, 4, exact=True, seconds=2)
    assert plan.value == 85 and plan.schedule.placement == Placement.loop(2, 2)


@pytest.mark.parametrize('keep_order', [True, False])
@pytest.mark.parametrize('slow', [0, 2])
def test_a_slow_device_on_a_v_is_megatrons_rank(slow, keep_order):
    """The loss is on Megatron's last rank; whose device is slow has the least work."""
    model = layers((1, 1, 1), *[(2, 2, 2)] * 13, (1, 1, 1))
    devices = Devices(
        tuple(Device(str(r), (3.0,) * 3 if r == slow else (1.0,) * 3) for r in range(3))
    )
    found = partition(
        model, devices, 6, placements=[Placement.v(3)], keep_order=keep_order, seconds=0.5
    )
    check(found.schedule)
    placement = found.schedule.placement
    assert placement.only_route == (2, 1, 0, 0, 1, 2)
    held = [sum(found.cuts[s] for s in placement.stages(rank)) for rank in range(3)]
    assert held[found.device_order.index(slow)] == min(held) < 5
    assert found.value == simulate(found.schedule, found.costs).makespan
    if keep_order:
        assert found.device_order == (0, 1, 2)


def test_bounds_of_all_partitions():
    for name, fused in (('P1', 86), ('P2', 157), ('P8', 456)):
        instance, more = asked(name)
        devices, placements = Devices.alike(instance.devices), more['placements']
        space = Space(instance.layers, devices, instance.m, placements, fused=True)
        bounds = Bounds(space)
        assert min(map(bounds.of, space.partitions())) == fused
        assert bounds.overall == pytest.approx(fused)


@pytest.mark.parametrize('seed', range(6))
def test_the_bound_is_below_everything(seed):
    """Devices and links of several kinds: the table's bound, each partition's, and simulations."""
    rng = random.Random(seed)
    own = layers(*[tuple(rng.randint(1, 6) for _ in 'FBW') for _ in range(7)])
    fast, slow = Device('fast'), Device('slow', (1.5, 2.0, 1.0))
    links = tuple(tuple(0.0 if a == b else rng.randint(0, 2) for b in range(3)) for a in range(3))
    for fused, devices in product((True, False), ([fast, slow, slow], [fast, fast, fast])):
        space = Space(own, Devices(tuple(devices), links), 5, [Placement.loop(3)], fused=fused)
        bounds = Bounds(space)
        found = [(bounds.of(p), rank(space, p)) for p in space.partitions()]
        assert bounds.overall <= min(bound for bound, _ in found) + 1e-9
        assert all(bound <= ranked.value + 1e-9 for bound, ranked in found)
        best = min(ranked.value for _, ranked in found)
        assert PartitionSearch(space, seconds=2).find()[0].value <= best + 1e-9


def test_many_partitions_are_climbed():
    """Two kinds of devices on two kinds of links: near the bound of all partitions, and of use."""
    model = Layers((Layer('E', 1, 0, 1), *[Layer('t', 4, 4, 3)] * 30, Layer('L', 9, 9, 9)))
    devices = Devices(
        tuple(Device(str(r), (1.0 + 0.5 * (r % 2),) * 3) for r in range(8)),
        tuple(tuple(2.0 * (a // 4 != b // 4) for b in range(8)) for a in range(8)),
    )
    plan = partition(model, devices, 16, placements=[Placement.loop(8)], seconds=2)
    assert plan.lower_bound <= plan.value <= 1.2 * plan.lower_bound
    assert plan.value < 0.8 * plan.even
    assert sorted(plan.device_order) == list(range(8))
    require_consistent(plan, None)


def test_multi_token_prediction_stays_together():
    """In the last stage; in a loop also in another chunk of the last ranks, but never in two."""
    parts = [Layer('t', 2, 2, 2)] * 4 + [Layer('m', 2, 2, 2)] * 2
    model = Layers((Layer('E'), *parts, Layer('L', 4, 4, 4)))
    plan = partition(model, 2, 4, placements=[Placement.v(2)], seconds=1)
    assert plan.layout.endswith('mmL')
    plan = partition(model, 2, 4, placements=[Placement.loop(2, 2)], seconds=1)
    assert 'mm' in plan.layout
    ahead = [Layer('m', 6, 6, 6)] * 2  # so heavy that they would rather be alone
    many = Layers((*model.layers[:5], *[model.layers[1]] * 30, *ahead, Layer('L', 9, 9, 9)))
    plan = partition(many, 4, 4, placements=[Placement.v(4)], seconds=1)
    assert plan.layout.endswith('mmL'), 'also where partitions are too many to list'


def test_memory_holds_parameters_too():
    """What they take is not there for activations."""
    model = Layers((*[replace(layer, parameters=1.0) for layer in P1.layers],))
    plan = partition(
        model, Devices((Device(memory=16.0),) * 4), 4, placements=[Placement.loop(4)], seconds=1
    )
    for held, cut in zip(plan.peak_activations, plan.cuts, strict=True):
        assert held + cut <= 16


def test_interrupted_with_the_best_so_far(monkeypatch):
    """Ctrl-C while planning: what is known by then."""
    monkeypatch.setattr('megatron_zbpp.planner.limits._REPORT_EVERY', 0.0)
    model = Layers((Layer('E', 1, 0, 1), *[Layer('t', 4, 5, 3)] * 14, Layer('L', 9, 9, 9)))
    told: list[float] = []

    def progress(share: float) -> None:
        told.append(share)
        if len(told) == 3:
            signal.raise_signal(signal.SIGINT)

    loop = [Placement.loop(4)]
    with pytest.raises(PartitionInterrupted) as caught:
        partition(model, 4, 8, placements=loop, memory_limit=10, seconds=3, progress=progress)
    best = caught.value.best
    assert len(told) == 3 and not best.repeats
    require_consistent(best, 10)


# ---- Large pipelines: two kinds of devices, two kinds of links, near the bound of all partitions.


def test_many_devices_change_places_at_distances_that_are_powers_of_two():
    many = 18
    devices = Devices(tuple(Device(str(at), (1.0 + at,) * 3) for at in range(many)))
    space: Any = SimpleNamespace(
        layers=(Layer('t', 1, 1, 1),), devices=devices, limits=(inf,) * many
    )
    partition = Partition(Placement.loop(many), (1,) * many, tuple(range(many)))
    found = [other.order for other in swapped(space, partition)]
    apart = [[at for at, device in enumerate(order) if at != device] for order in found]
    assert {b - a for a, b in apart} == {1, 2, 4, 8, 16}
    assert len(found) == sum(many - distance for distance in (1, 2, 4, 8, 16))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ('p', 'num_layers', 'm', 'seconds'), [(16, 96, 128, 55), (128, 512, 256, 240)]
)
def test_near_the_bound(p, num_layers, m, seconds):
    """On two cores in 60 seconds, and in 10 minutes."""
    decoder = Layer('t', 4, 4, 3, output=1)
    ends = Layer('E', 1, 0, 1, output=1), Layer('L', 12, 12, 12)
    model = Layers((ends[0], *[decoder] * (num_layers - 2), ends[1]))
    kinds = [(1.0 + 0.4 * (rank % 2),) * 3 for rank in range(p)]
    node = p // 4
    latency = tuple(
        tuple(0.0 if a == b else 0.5 if a // node == b // node else 3.0 for b in range(p))
        for a in range(p)
    )
    devices = Devices(tuple(Device(str(at), kind) for at, kind in enumerate(kinds)), latency)
    plan = partition(model, devices, m, placements=[Placement.loop(p)], seconds=seconds)
    check(plan.schedule)
    assert plan.lower_bound <= plan.value <= 1.01 * plan.lower_bound
    assert plan.value < 0.7 * plan.even


# ---- Files of layers and devices: read as they are meant, or refused.


HEAD = '{"format": "megatron_zbpp.layers/1", "layers": '


FILES = [*(each.layers for each in INSTANCES.values()), NODES, ONE_SLOW, Devices.alike(3)]


@pytest.mark.parametrize('own', FILES)
def test_files_come_back(own):
    assert type(own).from_json(own.to_json()) == own


def test_a_layer_of_which_nothing_is_said_takes_no_time():
    read = Layers.from_json(HEAD + '[{"kind": "t"}]}').layers
    assert read == (Layer('t', 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0),)


def test_costs_of_stages():
    """Sums of layers, by factor of their device; an edge is latency and output over bandwidth."""
    first = Layer('E', 1, 0, 1, activation=2, output=6), Layer('t', 2, 3, 4, retained=0.5, output=8)
    layers = Layers((*first, Layer('L', 5, 6, 7)))
    devices = Devices.from_json(
        '{"devices": [{"factor": {"F": 2, "W": 3}}, {}], "latency": [[0, 1], [2, 0]], '
        '"bandwidth": [[0, 4], [0, 0]]}'
    )
    costs = stage_costs(layers, devices, Partition(Placement.loop(2), (2, 1), (1, 0)))
    assert (costs.times['F'], costs.times['B'], costs.times['W']) == ((3, 10), (3, 6), (5, 21))
    assert (costs.amounts['activation'], costs.amounts['retained']) == ((3, 1), (2.5, 1))
    assert costs.edge(0, 1, (0, 1)) == 2 and costs.edge(1, 0, (1, 0)) == 1 + 8 / 4
    assert costs.hops == ((0, 8 / 4),)
    plain = Devices.from_json('{"devices": [{}, {}], "latency": [[0, 1], [2, 0]]}')
    assert not stage_costs(layers, plain, Partition(Placement.loop(2), (2, 1), (1, 0))).hops
