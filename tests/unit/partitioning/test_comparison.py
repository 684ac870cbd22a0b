"""Schedules over partitions and latencies: rows that are simulated, rankings that flip."""

import csv
import json
import re
from pathlib import Path
from unittest import mock

import pytest
from instances import NODES, P1, P4, P8
from paths import ROOT

from megatron_zbpp import Devices, Layer, Layers, build, load
from megatron_zbpp.ir.formats import load_plan
from megatron_zbpp.partitioning import comparison, plans
from megatron_zbpp.partitioning.comparison import compared, winners, with_latency
from megatron_zbpp.partitioning.search import rank
from megatron_zbpp.partitioning.space import Space


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
UNEVEN = Layers(
    (
        Layer('E', 1.0, 0.0, 1.0, activation=2.0),
        *[Layer('t', 4.0, 4.0, 3.0, activation=1.0)] * 14,
        Layer('L', 9.0, 9.0, 9.0, activation=3.0),
    )
)


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
    said = zbpp(f'{given} --latencies 0,2 --csv rows.csv')
    assert 'shortest on the best partition: ' in said and '1f1b, even' in said
    assert 'zb-v, best' in said and 'gain: time saved against 1f1b on the even partition' in said
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
    said = partition('4 --pp 4 --seconds 1 -o plan.json')
    assert 'layout Ett|tt|tt|L' in said
    assert 'even split with 1f1b: 104; this takes 37.5% less' in ' '.join(said.split())
    assert 'ended the search' not in said
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
