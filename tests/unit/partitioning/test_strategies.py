"""Planners of others on answers that are known and against all plans; schedules beside them."""

import csv
import json
import random
import re
from itertools import combinations
from pathlib import Path
from unittest import mock

import pytest
from instances import NODES, ONE_SLOW, P1, P3, P4, P8
from paths import ROOT
from published import published

from megatron_zbpp import Device, Devices, Layer, Layers, build, load
from megatron_zbpp.ir.formats import load_plan
from megatron_zbpp.partitioning import comparison, plans
from megatron_zbpp.partitioning.comparison import compared, winners, with_latency
from megatron_zbpp.partitioning.replicated_stages import (
    Model,
    Stage,
    admitted,
    dapple,
    latency_bound,
    pipedream,
    simulated_latency,
)
from megatron_zbpp.partitioning.search import rank
from megatron_zbpp.partitioning.space import Space
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


# ---- Schedules over partitions and latencies: rows that are simulated, rankings that flip.


def test_rows():
    """1F1B on P1: the even split and the best known one; others are no worse for being best."""
    rows = list(compared(P1, Devices.alike(4), 4, ['1f1b', 'zb-h1', 'zb-1p', 'zb-v'], [0.0, 2.0]))
    found = {(*row[:2], row.latency): row for row in rows}
    assert len(rows) == 16
    assert found['1f1b', 'even', 0.0].makespan == 104
    assert found['1f1b', 'best', 0.0].makespan == 86
    assert found['1f1b', 'best', 0.0].layout == 'Ett|tt|tt|L'
    for (name, kind, latency), row in found.items():
        assert row.makespan <= found[name, 'even', latency].makespan
        assert row.makespan >= found[name, kind, 0.0].makespan
    assert all(
        row.makespan <= found[key].makespan for key, row in found.items() if key[1] == 'best'
    )
    # with free links ZB-V is ahead; where they are slow, what sends less or runs ahead
    names = ['1f1b', '1f1b-pb', 'zb-h1', 'zb-h2', 'zb-v']
    best = winners(compared(P8, Devices.alike(4), 16, names, [0.0, 30.0]))
    assert best['even', 0.0].schedule != best['even', 30.0].schedule
    assert best['best', 30.0].schedule in ('zb-h2', '1f1b-pb')
    assert best['best', 0.0].makespan <= best['even', 0.0].makespan


def test_the_table_of_the_page():
    """What docs/unbalanced.md prints is what the command prints."""
    text = (ROOT / 'docs' / 'unbalanced.md').read_text()
    layers = re.search(r'title="layers.json"\n(.*?)```', text, re.S)[1]
    table = re.findall(
        r'^\| `(.+?)`, (even|best) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|', text, re.M
    )
    names = sorted({name for name, *_ in table})
    latencies = [0.0, 2.0, 8.0, 32.0]
    rows = compared(Layers.from_json(layers), Devices.alike(4), 16, names, latencies)
    found = {(row.schedule, row.partition, row.latency): row.makespan for row in rows}
    assert len(table) == 8
    for name, kind, *values in table:
        for latency, value in zip(latencies, values, strict=True):
            assert round(found[name, kind, latency]) == int(value)


# the ends hold more, so that the even split needs 20 activations
ENDS = Layer('E', 1.0, 0.0, 1.0, activation=2.0), Layer('L', 9.0, 9.0, 9.0, activation=3.0)
UNEVEN = Layers((ENDS[0], *[Layer('t', 4.0, 4.0, 3.0, activation=1.0)] * 14, ENDS[1]))


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_the_best_partition_is_searched_within_memory(name):
    """Where the even split does not fit: one is found wherever there is one, and no worse one."""
    placement, devices = build(name, 4, 8).placement, Devices.alike(4)
    found: dict[int, float] = {}
    for limit in (8, 10, 15, 17, 20):
        (best,) = compared(UNEVEN, devices, 8, [name], [0.0], ('best',), memory_limit=limit)
        assert best.fits == (best.peak <= limit)
        if best.fits:
            found[limit] = best.makespan
        if placement.num_chunks > 1:
            continue
        space = Space(UNEVEN, devices, 8, [placement], limit, keep_order=True)
        each = (rank(space, where, (name,), draft=False) for where in space.partitions())
        known = min((one.value for one in each if one is not None), default=None)
        assert known == found.get(limit), limit
    assert [*found] == {'1f1b': [10, 15, 17, 20], 'zb-h1': [20], 'zb-v': [17, 20]}[name]
    if name == 'zb-v':  # of all 6435 partitions the best take 496 and 457
        assert found[17] == 496 and found[20] <= 458


def test_the_even_split_is_built_once(monkeypatch):
    """For its row, and where the search begins that nothing keeps in its memory."""
    costs, devices = mock.Mock(wraps=comparison.stage_costs), Devices.alike(4)
    monkeypatch.setattr(comparison, 'stage_costs', costs)
    rows = [*compared(UNEVEN, devices, 8, ['zb-v'], [0.0], memory_limit=17)]
    assert [row.fits for row in rows] == [False, True]
    placement = build('zb-v', 4, 8).placement
    even = Space(UNEVEN, devices, 8, [placement]).even(placement)
    assert [call.args[2] for call in costs.call_args_list].count(even) == 1


def test_schedules_that_adapt_do_so_within_memory():
    """`zb-1p` is built for the limit, as it is where its best partition is searched."""
    held = {}
    for limit in (11, 20):
        (best,) = compared(
            UNEVEN, Devices.alike(4), 8, ['zb-1p'], [0.0], ('best',), memory_limit=limit
        )
        assert best.fits and best.peak <= limit
        held[limit] = best.makespan
    assert held[11] > held[20]
    rows = compared(UNEVEN, Devices.alike(4), 8, ['zb-v', '1f1b'], [0.0, 5.0])
    found = {(row.schedule, row.partition, row.latency): row for row in rows}
    for (*_, latency), row in found.items():
        rival = found['1f1b', 'even', latency].makespan
        assert row.gain == pytest.approx(1 - row.makespan / rival)
    assert found['1f1b', 'even', 5.0].gain == 0 < found['zb-v', 'best', 0.0].gain
    assert with_latency(NODES, 1.0).edge(0, 1, 0.0) == 5
    assert with_latency(NODES, 1.0).edge(0, 2, 0.0) == 1
    assert with_latency(NODES, 1.0).edge(0, 0, 0.0) == 0


def test_command(zbpp):
    Path('layers.json').write_text(P1.to_json())
    given = 'compare --layers-file layers.json --pp 2 --microbatches 4 --schedules 1f1b,zb-v'
    zbpp(f'{given} --latencies 0,2 --csv rows.csv')
    table = list(csv.DictReader(Path('rows.csv').read_text().splitlines()))
    assert len(table) == 8 and {row['latency'] for row in table} == {'0.0', '2.0'}
    assert len(zbpp(f'{given} --latencies 0,2 --json')['best']) == 4


# ---- `zbpp partition`: what it prints, writes and refuses.


@pytest.fixture
def partition(zbpp):
    """Partitions layers, of the file if there is nothing else."""
    Path('layers.json').write_text(P1.to_json())
    return lambda more, code=0: zbpp(f'partition layers.json --microbatches {more}', code=code)


def test_plan_for_people_and_for_megatron(partition, zbpp):
    assert 'ended the search' not in partition('4 --pp 4 --seconds 1 -o plan.json')
    assert load_plan('plan.json').schedule.num_stages == 4
    assert load_plan('plan.json').layout == 'Ett|tt|tt|L'
    zbpp('check plan.json')
    zbpp('convert --file plan.json --to torch-csv -o plan.csv')
    assert load('plan.csv').passes == load('plan.json').passes
    assert load_plan('plan.csv').layout is None
    assert 'with the ranks reversed' in partition('4 --placements v --pp 2 --seconds 1')


HEAVY = [
    {'kind': 'E', 'F': 1, 'W': 1},
    {'kind': 't', 'count': 14, 'F': 4, 'B': 4, 'W': 3},
    {'kind': 'L', 'F': 9, 'B': 9, 'W': 9},
]


def test_what_it_holds_beside_the_even_split(partition):
    """More than that by its memory, too; and what more time might bring."""
    heavy = {'format': 'megatron_zbpp.layers/1', 'layers': HEAVY}
    Path('layers.json').write_text(json.dumps(heavy))
    given = '8 --pp 4 --seconds 1'
    said = ' '.join(partition(f'{given} --placements v').split())
    bound, value = (
        float(re.search(rf'{word} (\d+)', said)[1]) for word in ('all partitions', 'makespan')
    )
    held = re.search(r'even split with 1f1b: 603; this takes .* less(, and holds .*:|) ?', said)
    most = max(int(own) for own in re.findall(r'[tEL]+ \d+ (\d+)', said))
    assert (most > 16) == bool(held[1]), '1F1B holds four microbatches of four layers'
    assert not held[1] or f'{most / 16:.1f} times its activations: --memory-limit' in said
    clock = f'another plan, up to {1 - bound / value:.1%} faster; with more --seconds'
    assert (clock in said) == (value > bound)
    assert '--memory-limit' not in partition(f'{given} --memory-limit 40')


def test_devices_and_limits(partition):
    Path('layers.json').write_text(P4.to_json())
    Path('devices.json').write_text(NODES.to_json())
    given = '4 --devices devices.json --json'
    assert partition(f'{given} --placements loop --fused')['makespan'] == 92
    assert partition(f'{given} --schedules 1f1b --keep-order')['makespan'] == 118


def test_interrupted(partition, zbpp, monkeypatch):
    """The best by then, and the exit code of Ctrl-C."""
    found = plans.partition(P1, 4, 4, seconds=1)

    def interrupted(*args, **kwargs):
        raise plans.PartitionInterrupted(found)

    monkeypatch.setattr('megatron_zbpp.partitioning.plans.partition', interrupted)
    assert partition('4 --pp 4 --json', 130)['makespan'] == found.value
    assert 'interrupted' in zbpp.err
