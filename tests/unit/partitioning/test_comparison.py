"""Schedules over partitions and latencies: rows that are simulated, rankings that flip."""

from __future__ import annotations

import csv
import json
import re

import pytest
from instances import NODES, P1, P8
from paths import ROOT

from megatron_zbpp import Devices, Layers
from megatron_zbpp.cli import main
from megatron_zbpp.partitioning.comparison import compared, winners, with_latency
from megatron_zbpp.partitioning.layers import Layer
from megatron_zbpp.partitioning.ranking import rank
from megatron_zbpp.partitioning.space import Space
from megatron_zbpp.schedules import build


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


def test_the_ranking_flips():
    """With free links ZB-V is ahead; where they are slow, what sends less or runs ahead."""
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
        space = Space.of(UNEVEN, devices, 8, [placement], limit, keep_order=True)
        each = (rank(space, where, (name,), draft=False) for where in space.partitions())
        known = min((one.value for one in each if one is not None), default=None)
        assert known == found.get(limit), limit
    assert [*found] == {'1f1b': [10, 15, 17, 20], 'zb-h1': [20], 'zb-v': [17, 20]}[name]
    if name == 'zb-v':  # of all 6435 partitions the best take 496 and 457
        assert found[17] == 496 and found[20] <= 458


def test_the_even_split_is_built_once(monkeypatch):
    """For its row, and where the search begins that nothing keeps in its memory."""
    from megatron_zbpp.partitioning import comparison

    built, own, devices = [], comparison.stage_costs, Devices.alike(4)

    def kept(layers, devices, where):
        built.append(where)
        return own(layers, devices, where)

    monkeypatch.setattr(comparison, 'stage_costs', kept)
    rows = [*compared(UNEVEN, devices, 8, ['zb-v'], [0.0], memory_limit=17)]
    assert [row.fits for row in rows] == [False, True]
    even = Space.of(UNEVEN, devices, 8, [build('zb-v', 4, 8).placement]).even
    assert built.count(even(build('zb-v', 4, 8).placement)) == 1


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


def test_gains_are_over_1f1b_on_the_even_partition():
    rows = compared(UNEVEN, Devices.alike(4), 8, ['zb-v', '1f1b'], [0.0, 5.0])
    found = {(row.schedule, row.partition, row.latency): row for row in rows}
    for (*_, latency), row in found.items():
        rival = found['1f1b', 'even', latency].makespan
        assert row.gain == pytest.approx(1 - row.makespan / rival)
    assert found['1f1b', 'even', 5.0].gain == 0 < found['zb-v', 'best', 0.0].gain


def test_latency_is_added():
    assert (
        with_latency(NODES, 1.0).edge(0, 1, 0.0) == 5
        and with_latency(NODES, 1.0).edge(0, 2, 0.0) == 1
    )
    assert with_latency(NODES, 1.0).edge(0, 0, 0.0) == 0


def test_command(tmp_path, capsys):
    file, rows = tmp_path / 'layers.json', tmp_path / 'rows.csv'
    file.write_text(P1.to_json())
    given = ['compare', '--layers-file', str(file), '--pp', '2', '--microbatches', '4']
    given += ['--schedules', '1f1b,zb-v', '--latencies', '0,2']
    assert main([*given, '--csv', str(rows)]) == 0
    said = capsys.readouterr().out
    assert 'shortest on the best partition: ' in said and '1f1b, even' in said
    assert 'zb-v, best' in said and 'gain: time saved against 1f1b on the even partition' in said
    table = list(csv.DictReader(rows.open()))
    assert len(table) == 8 and {row['latency'] for row in table} == {'0.0', '2.0'}
    assert main([*given, '--json']) == 0
    assert len(json.loads(capsys.readouterr().out)['best']) == 4


@pytest.mark.parametrize(
    ('more', 'said'),
    [
        (['--csv', 'rows.csv'], '--csv goes with --layers-file'),
        (['--layers-file', 'LAYERS', '-o', 'a.svg'], '--output does not go with --layers-file'),
        (['--layers-file', 'LAYERS', '--times', '1,2,1'], '--times does not go with --layers-file'),
        (['--layers-file', 'LAYERS', '--comm', '0'], '--latencies says what a message takes'),
        (['--layers-file', 'LAYERS', '--vpp', '2'], '--vpp does not go with --layers-file'),
        (['--layers-file', 'LAYERS', '--memory-limit', '0.5'], 'holds 6, above its memory'),
        (['--layers-file', 'LAYERS', '--memory-limit', '1GiB'], 'hold 8: give their activation'),
        (['--layers-file', 'LAYERS', '--schedules', 'zb-w'], "unknown schedule 'zb-w'"),
        (
            ['--layers-file', 'LAYERS', '--schedules', 'hanayo', '--pp', '7'],
            'no schedule fits: without hanayo',
        ),
    ],
)
def test_what_cannot_be(tmp_path, capsys, more, said):
    file = tmp_path / 'layers.json'
    file.write_text(P1.to_json())
    more = [str(file) if word == 'LAYERS' else word for word in more]
    assert main(['compare', '--pp', '2', '--microbatches', '4', *more]) == 2
    assert said in capsys.readouterr().err
