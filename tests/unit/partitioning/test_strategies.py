"""The planners of others, on answers that are known and against all plans."""

import random
from itertools import combinations
from pathlib import Path

import pytest
from instances import NODES, ONE_SLOW, P3, P4, P8
from published import published

from megatron_zbpp import Device, Devices, Layer, Layers
from megatron_zbpp.partitioning.replicated_stages import (
    Model,
    Stage,
    admitted,
    dapple,
    latency_bound,
    pipedream,
    simulated_latency,
)
from megatron_zbpp.partitioning.strategies import choices, min_cut_order, pipe_torch, two_bw


@pytest.mark.parametrize(
    ('times', 'parameters', 'outputs', 'devices', 'bandwidth', 'value', 'stages', 'noam'),
    published(__file__, "PipeDream's planner"),
)
def test_pipedream(times, parameters, outputs, devices, bandwidth, value, stages, noam):
    found, chosen = pipedream(times, outputs, parameters, devices, bandwidth)
    assert found == value
    assert stages is None or (list(map(list, chosen)), admitted(chosen)) == (stages, noam)
    assert sum(stage.replicas for stage in chosen) == devices


@pytest.mark.parametrize('seed', range(4))
def test_pipedream_straight_is_the_best_of_all(seed):
    rng = random.Random(seed)
    times = [rng.randint(1, 9) for _ in range(7)]
    outputs = [rng.randint(0, 9) for _ in times]
    value, _ = pipedream(times, outputs, [0] * 7, 3, 2.0, straight=True)
    assert value == min(
        max(sum(times[:a]), sum(times[a:b]), sum(times[b:]), outputs[a - 1], outputs[b - 1])
        for a, b in combinations(range(1, 7), 2)
    )


@pytest.mark.parametrize(
    ('times', 'parameters', 'devices', 'm', 'value', 'stages'),
    published(__file__, "DAPPLE's planner"),
)
def test_dapple(times, parameters, devices, m, value, stages):
    model = Model(times, [2 * time for time in times], [0] * len(times), parameters)
    assert dapple(model, devices, m) == (value, tuple(map(tuple, stages)))


@pytest.mark.parametrize(('output', 'value'), [(0, 114), (1, 120), (2, 126), (4, 166)])
def test_dapple_has_links_as_stages(output, value):
    """Short ones are hidden as by 1f1b-pb; a long one is the stage that all wait for."""
    model = Model([2] * 4, [4] * 4, [output] * 4, [0] * 4)
    found, stages = dapple(model, 4, 16, straight=True)
    assert found == value and [stage.replicas for stage in stages] == [1] * 4


@pytest.mark.parametrize('seed', range(20))
def test_no_schedule_is_below_the_bound(seed):
    rng = random.Random(seed)
    stages = [Stage(rng.randint(1, 9), rng.randint(1, 18)) for _ in range(4)]
    bound, taken = latency_bound(stages, 6), simulated_latency(stages, 6)
    assert bound <= taken
    alike = [Stage(2, 4)] * 4
    assert latency_bound(alike, 6) == simulated_latency(alike, 6)


def test_pipe_torch_orders_devices():
    """The slow one gets few layers; a slow link is crossed once, or where little is sent."""
    value, cuts, order = pipe_torch(P3, ONE_SLOW)
    assert value == 12 and cuts[order.index(2)] <= 2
    value, _, order = pipe_torch(P4, NODES)
    assert value == 12 and sorted(order) == [0, 1, 2, 3]
    slow = Devices(NODES.devices, tuple(tuple(10 * x for x in row) for row in NODES.latency))
    assert pipe_torch(P4, slow)[0] == 80  # no order avoids the link
    # grown rank by rank: as good as the best of devices that are alike
    devices = Devices(tuple(Device(str(r), (1.0 + (r == 3),) * 3) for r in range(8)))
    value, cuts, order = pipe_torch(P8, devices)
    assert sum(cuts) == len(P8) and sorted(order) == list(range(8))
    assert value <= pipedream([x.time for x in P8], [0] * 16, [0] * 16, 8, straight=True)[0] * 1.3


def test_a_minimum_cut_keeps_nodes_together():
    assert min_cut_order(NODES, 0.0) == (0, 2, 1, 3)
    far = [[0 if a == b else 1 if a % 4 == b % 4 else 9 for b in range(16)] for a in range(16)]
    order = min_cut_order(Devices(tuple([Device()] * 16), tuple(map(tuple, far))), 0.0)
    assert [{d % 4 for d in order[at : at + 4]} for at in range(0, 16, 4)].count({0}) == 1
    assert all(len({d % 4 for d in order[at : at + 4]}) == 1 for at in range(0, 16, 4))
    # all devices half as fast: half the throughput; the smallest memory counts
    model = Layers(tuple([Layer('t', 1, 1, 1, parameters=2.0, output=1.0)] * 8))
    four = [Device() for _ in range(4)]
    fast = two_bw(model, Devices(tuple(four)), 16)
    slow = two_bw(model, Devices(tuple([Device('', (2.0, 2.0, 2.0))] * 4)), 16)
    assert fast.throughput == 2 * slow.throughput == 4 / 24
    assert fast.width == 4 and not fast.recompute
    small = Devices((*four[:3], Device(memory=20.0)))
    found = two_bw(model, small, 16)
    assert found.memory <= 20 and found.depth > 1
    fitting = [c.throughput for c in choices(model, small, 16) if c.memory <= 20]
    assert found.throughput == max(fitting)


@pytest.fixture
def planned(zbpp):
    """Plans for files of layers and devices; returns what is said of it, too."""

    def run(strategy: str, layers: Layers, devices: Devices, m: int) -> tuple[dict, str]:
        Path('layers.json').write_text(layers.to_json())
        Path('devices.json').write_text(devices.to_json())
        words = 'partition layers.json --devices devices.json'
        words += f' --microbatches {m} --strategy {strategy} --json'
        return zbpp(words), zbpp.err

    return run


def model(times, parameters, outputs):
    """Layers of which F, B and W take a third of the time each."""
    each = zip(f'E{"t" * (len(times) - 2)}L', times, parameters, outputs, strict=True)
    return Layers(
        tuple(Layer(kind, *[t / 3] * 3, parameters=held, output=o) for kind, t, held, o in each)
    )


LINKS = Devices(  # of a unit of output, or of parameters, a unit of time
    tuple(Device(str(rank)) for rank in range(4)),
    bandwidth=tuple(tuple(float(a != b) for b in range(4)) for a in range(4)),
)
ON_LINKS = [0, 1, 2, 3]
KNOWN = [
    ('pipedream', model([4] * 4, [1, 1, 1, 20], [6, 4, 1, 1]), LINKS, 4,
     '4 between microbatches, 2 admitted, with layers 0-2 x3, layers 3-3 x1', ON_LINKS),
    ('dapple', model([3] * 4, [1, 1, 1, 30], [0] * 4), LINKS, 8,
     '30 a batch, with layers 0-0 x1, layers 1-2 x2, layers 3-3 x1', ON_LINKS),
    ('pipe-torch', P3, ONE_SLOW, 6, '12 between microbatches, asynchronous', None),
    ('spp', P4, NODES, 4, 'in the order of a minimum cut, 0, 2, 1, 3', [0, 2, 1, 3]),
    ('2bw', model([3] * 8, [2] * 8, [1] * 8), LINKS, 16,
     '4 pipelines of 1 stages, 4 microbatches of 1 samples: 0.166667 samples', ON_LINKS),
]  # fmt: skip


@pytest.mark.parametrize(('strategy', 'layers', 'devices', 'm', 'words', 'order'), KNOWN)
def test_known_answers_by_name(planned, strategy, layers, devices, m, words, order):
    """From files, by the command: what each strategy chooses, and a plan for Megatron."""
    found, said = planned(strategy, layers, devices, m)
    assert said.startswith(f'{strategy}: ') and words in said
    assert found['makespan'] >= found['lower_bound'] > 0 and sum(found['cuts']) == len(layers)
    assert ("an estimate, as Megatron's grid" in said) == (strategy in ('pipedream', 'dapple'))
    assert order is None or found['device_order'] == order


@pytest.mark.parametrize('strategy', ['spp', 'pipe-torch'])
def test_a_strategy_for_a_slow_device(planned, strategy):
    """Stages are for the devices in the order that it chooses: the slow one has few layers."""
    devices = Devices((Device('slow', (3.0, 3.0, 3.0)), *NODES.devices[1:]), NODES.latency)
    found, _ = planned(strategy, P8, devices, 8)
    assert found['cuts'][found['device_order'].index(0)] == min(found['cuts']) < 3
