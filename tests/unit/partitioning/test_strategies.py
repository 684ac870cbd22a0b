"""The planners of others, on answers that are known and against all plans."""

from __future__ import annotations

import json
import random
from itertools import combinations
from math import inf

import pytest
from instances import NODES, ONE_SLOW, P1, P3, P4, P8

from megatron_zbpp import Device, Devices, Layer, Layers
from megatron_zbpp.cli import main
from megatron_zbpp.partitioning.strategies.dapple import (
    Model,
    Stage,
    admitted,
    dapple,
    latency_bound,
    pipedream,
    pivot_latency,
    simulated_latency,
)
from megatron_zbpp.partitioning.strategies.pipe_torch import pipe_torch
from megatron_zbpp.partitioning.strategies.spp import min_cut_order
from megatron_zbpp.partitioning.strategies.two_bw import choices, two_bw


@pytest.mark.parametrize(
    ('times', 'parameters', 'outputs', 'devices', 'bandwidth', 'value', 'stages', 'noam'),
    [
        ([4] * 6, [0] * 6, [0] * 6, 3, inf, 8, None, None),
        ([2, 2, 8, 2, 2], [0] * 5, [0] * 5, 4, inf, 4, None, None),
        ([4] * 4, [1, 1, 1, 20], [6, 4, 1, 1], 4, 1, 4, [(0, 3, 3), (3, 4, 1)], 2),
        ([6, 6, 6, 3, 3], [0, 0, 0, 9, 9], [2, 2, 1, 1, 1], 4, 1, 6, [(0, 3, 3), (3, 5, 1)], 2),
    ],
)
def test_pipedream(times, parameters, outputs, devices, bandwidth, value, stages, noam):
    found, chosen = pipedream(times, outputs, parameters, devices, bandwidth)
    assert found == value
    assert stages is None or (list(chosen), admitted(chosen)) == (stages, noam)
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
    [
        ([1] * 4, [1, 1, 1, 30], 4, 8, 30.0, [(0, 1, 1), (1, 3, 2), (3, 4, 1)]),
        ([1] * 4, [0] * 4, 4, 8, 24.0, [(0, 4, 4)]),
        ([2, 1, 1], [2, 2, 12], 3, 6, 32.5, [(0, 2, 2), (2, 3, 1)]),
    ],
)
def test_dapple(times, parameters, devices, m, value, stages):
    model = Model(times, [2 * time for time in times], [0] * len(times), parameters)
    assert dapple(model, devices, m) == (value, tuple(stages))


@pytest.mark.parametrize(('output', 'value'), [(0, 114), (1, 120), (2, 126), (4, 166)])
def test_dapple_has_links_as_stages(output, value):
    """Short ones are hidden as by 1f1b-pb; a long one is the stage that all wait for."""
    model = Model([2] * 4, [4] * 4, [output] * 4, [0] * 4)
    found, stages = dapple(model, 4, 16, straight=True)
    assert found == value and [stage.replicas for stage in stages] == [1] * 4


@pytest.mark.parametrize('seed', range(20))
def test_the_pivot_is_an_estimate_and_its_maximum_a_bound(seed):
    rng = random.Random(seed)
    stages = [Stage(rng.randint(1, 9), rng.randint(1, 18)) for _ in range(4)]
    bound, taken = latency_bound(stages, 6), simulated_latency(stages, 6)
    assert bound <= taken
    assert 0.7 * taken <= pivot_latency(stages, 6) <= bound + 1e-9
    alike = [Stage(2, 4)] * 4
    assert pivot_latency(alike, 6) == latency_bound(alike, 6) == simulated_latency(alike, 6)


def test_pipe_torch_orders_devices():
    """The slow one gets few layers; a slow link is crossed once, or where little is sent."""
    value, cuts, order = pipe_torch(P3, ONE_SLOW)
    assert value == 12 and cuts[order.index(2)] <= 2
    value, _, order = pipe_torch(P4, NODES)
    assert value == 12 and sorted(order) == [0, 1, 2, 3]
    slow = Devices(NODES.devices, tuple(tuple(10 * x for x in row) for row in NODES.latency))
    assert pipe_torch(P4, slow)[0] == 80  # no order avoids the link


def test_pipe_torch_of_many_devices():
    """Grown rank by rank: as good as the best of devices that are alike."""
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


def test_2bw_takes_factors_and_memory():
    """All devices half as fast: half the throughput; the smallest memory counts."""
    model = Layers(tuple([Layer('t', 1, 1, 1, parameters=2.0, output=1.0)] * 8))
    four = [Device() for _ in range(4)]
    fast = two_bw(model, Devices(tuple(four)), 16)
    slow = two_bw(model, Devices(tuple([Device('', (2.0, 2.0, 2.0))] * 4)), 16)
    assert fast.throughput == 2 * slow.throughput == 4 / 24
    assert fast.width == 4 and not fast.recompute
    small = Devices((*four[:3], Device(memory=20.0)))
    found = two_bw(model, small, 16)
    assert found.memory <= 20 and found.depth > 1
    assert found.throughput == max(
        c.throughput for c in choices(model, small, 16) if c.memory <= 20
    )
    with pytest.raises(ValueError, match='2bw: no width'):
        two_bw(model, Devices((*four[:3], Device(memory=1.0))), 16)


@pytest.mark.parametrize('strategy', ['pipedream', 'dapple', 'pipe-torch', 'spp', '2bw'])
def test_by_name(strategy, tmp_path, capsys):
    """Each says what its own plan is, and plans for Megatron; none is below the bound."""
    file = tmp_path / 'layers.json'
    file.write_text(P1.to_json())
    given = ['partition', str(file), '--pp', '4', '--microbatches', '4', '--strategy', strategy]
    assert main([*given, '--json']) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err.startswith(strategy)
    assert found['makespan'] >= found['lower_bound'] > 60.9 and sum(found['cuts']) == 8
    uneven = strategy in ('pipedream', 'dapple')
    assert ("an estimate, as Megatron's grid" in printed.err) == uneven


def model(times, parameters, outputs):
    """Layers of which F, B and W take a third of the time each."""
    kinds = f'E{"t" * (len(times) - 2)}L'
    return Layers(
        tuple(
            Layer(kind, time / 3, time / 3, time / 3, parameters=held, output=sent)
            for kind, time, held, sent in zip(kinds, times, parameters, outputs, strict=True)
        )
    )


LINKS = Devices(  # of a unit of output, or of parameters, a unit of time
    tuple(Device(str(rank)) for rank in range(4)),
    bandwidth=tuple(tuple(float(a != b) for b in range(4)) for a in range(4)),
)


@pytest.mark.parametrize(
    ('strategy', 'layers', 'devices', 'm', 'said', 'order'),
    [
        (
            'pipedream',
            model([4] * 4, [1, 1, 1, 20], [6, 4, 1, 1]),
            LINKS,
            4,
            '4 between microbatches, 2 admitted, with layers 0-2 x3, layers 3-3 x1',
            [0, 1, 2, 3],
        ),
        (
            'dapple',
            model([3] * 4, [1, 1, 1, 30], [0] * 4),
            LINKS,
            8,
            '30 a batch, with layers 0-0 x1, layers 1-2 x2, layers 3-3 x1',
            [0, 1, 2, 3],
        ),
        ('pipe-torch', P3, ONE_SLOW, 6, '12 between microbatches, asynchronous', None),
        ('spp', P4, NODES, 4, 'in the order of a minimum cut, 0, 2, 1, 3', [0, 2, 1, 3]),
        (
            '2bw',
            model([3] * 8, [2] * 8, [1] * 8),
            LINKS,
            16,
            '4 pipelines of 1 stages, 4 microbatches of 1 samples: 0.166667 samples',
            [0, 1, 2, 3],
        ),
    ],
)
def test_known_answers_by_name(tmp_path, capsys, strategy, layers, devices, m, said, order):
    """From files, by the command: what each strategy is known to choose."""
    files = [tmp_path / 'layers.json', tmp_path / 'devices.json']
    for file, each in zip(files, (layers, devices), strict=True):
        file.write_text(each.to_json())
    given = ['partition', str(files[0]), '--devices', str(files[1]), '--microbatches', str(m)]
    assert main([*given, '--strategy', strategy, '--json']) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f'{strategy}: ') and said in printed.err
    found = json.loads(printed.out)
    assert sum(found['cuts']) == len(layers)
    assert order is None or found['device_order'] == order


def test_a_strategy_for_a_slow_device(tmp_path, capsys):
    """Stages are for the devices in the order that it chooses: the slow one has few layers."""
    devices = Devices((Device('slow', (3.0, 3.0, 3.0)), *NODES.devices[1:]), NODES.latency)
    files = [tmp_path / 'layers.json', tmp_path / 'devices.json']
    for file, each in zip(files, (P8, devices), strict=True):
        file.write_text(each.to_json())
    given = ['partition', str(files[0]), '--devices', str(files[1]), '--microbatches', '8']
    for strategy in ('spp', 'pipe-torch'):
        assert main([*given, '--strategy', strategy, '--json']) == 0
        found = json.loads(capsys.readouterr().out)
        slow = found['device_order'].index(0)
        assert found['cuts'][slow] == min(found['cuts']) < 3


@pytest.mark.parametrize(
    ('strategy', 'more', 'said'),
    [
        ('pipedream', ['--exact'], '--strategy pipedream takes no --exact'),
        ('dapple', ['--placements', 'v'], '--strategy dapple takes no --placements'),
        ('2bw', ['--schedules', '1f1b'], '--strategy 2bw takes no --schedules'),
        ('spp', ['--keep-order'], '--strategy spp takes no --keep-order'),
        ('dapple', ['--pp', '12'], 'there are 7726160, more than 100000'),
    ],
)
def test_what_a_strategy_ignores_is_refused(strategy, more, said, tmp_path, capsys):
    file = tmp_path / 'layers.json'
    file.write_text(P8.to_json())
    pp = [] if '--pp' in more else ['--pp', '4']
    given = ['partition', str(file), *pp, '--microbatches', '4', '--strategy', strategy]
    assert main([*given, *more]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize('strategy', ['pipedream', 'dapple'])
def test_devices_that_differ_are_refused(strategy, tmp_path, capsys):
    layers, devices = tmp_path / 'layers.json', tmp_path / 'devices.json'
    layers.write_text(P3.to_json())
    devices.write_text(ONE_SLOW.to_json())
    given = ['partition', str(layers), '--devices', str(devices), '--microbatches', '4']
    assert main([*given, '--strategy', strategy]) == 2
    assert 'devices and links that are alike' in capsys.readouterr().err
