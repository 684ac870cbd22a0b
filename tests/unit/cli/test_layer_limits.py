"""Limits of memory beside --layers-file: in its unit or in GiB, answered as they are counted."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megatron_zbpp import load, simulate
from megatron_zbpp.cli import main
from megatron_zbpp.ir.formats import BYTES
from megatron_zbpp.partitioning.layers import Layer, Layers

GIB = 2**30
SIZES = '--pp 2 --microbatches 6'
TIMES = 1.0, 1.2, 0.8
# on the even split each rank has 4 layers, of 4 GiB for each microbatch, and 8 GiB of parameters
LAYERS = [
    Layer('E', 0.1, 0.0, 0.1, activation=0.0, parameters=0.0),
    *[Layer('t', *TIMES, activation=GIB, parameters=2 * GIB)] * 8,
    Layer('L', 0.1, 0.1, 0.1, activation=0.0, parameters=0.0),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    Path('bytes.json').write_text(Layers(tuple(LAYERS)).to_json())
    plain = [Layer('t', *TIMES, activation=1.0, parameters=2.0)] * 8
    Path('units.json').write_text(Layers(tuple(plain)).to_json())
    timed = '{"format": "megatron_zbpp.layers/1", "layers": [{"kind": "t", "count": 8, "F": 1}]}'
    Path('timed.json').write_text(timed)


@pytest.fixture
def run(capsys):
    def run(line: str, status: int = 0) -> tuple[str, str]:
        assert main(line.split()) == status, line
        return capsys.readouterr()

    return run


def test_a_plan_stays_within_it(run):
    """More memory never costs time; the file says the layout, by which the job is placed."""
    line = f'plan {SIZES} --vpp 1 --layers-file bytes.json --seconds 0.5 --no-cache -o plan.json'
    taken = []
    for limit in (12.5, 16.5, 20.5):
        out, _ = run(f'{line} --memory-limit {limit}GiB')
        assert 'peak memory ' in out and ' GiB\n' in out and '\nlayout Etttt|ttttL\n' in out
        made = json.loads(Path('plan.json').read_text())
        assert max(made['peak_activations']) + 8 * GIB <= limit * GIB, 'parameters count'
        assert made['units']['memory'] == BYTES and made['layout'] == 'Etttt|ttttL'
        taken.append(made['makespan'])
        assert simulate(load('plan.json')).makespan == pytest.approx(made['makespan'])
    assert taken[0] > taken[-1] and taken == sorted(taken, reverse=True), taken


def test_what_does_not_fit_is_told_as_it_is_counted(run):
    plan, shown = f'plan {SIZES} --vpp 1 --layers-file', f'simulate --schedule 1f1b {SIZES}'
    told = run(f'{plan} bytes.json --memory-limit 11GiB', 2)[1]
    assert 'below 8 GiB of weights' in told and 'at least 12 GiB' in told
    told = run(f'{plan} units.json --memory-limit 11', 2)[1]
    assert 'below 8 of weights' in told and 'at least 12,' in told
    told = run(f'{shown} --layers-file bytes.json --memory-limit 12GiB', 2)[1]
    assert 'above the limit of 12 GiB' in told and 'beside parameters of 8 GiB' in told
    assert run(f'{shown} --layers-file bytes.json --memory-limit 16GiB')
    assert run(f'{shown} --layers-file units.json --memory-limit 16')
    told = run(f'{shown} --layers-file units.json --memory-limit 12', 2)[1]
    assert 'above the limit of 12:' in told


@pytest.mark.parametrize('file', ['units.json', 'timed.json'])
@pytest.mark.parametrize(
    'line',
    [
        f'plan {SIZES} --layers-file',
        f'simulate --schedule zb-h1 {SIZES} --layers-file',
        f'compare {SIZES} --schedules 1f1b --layers-file',
        f'partition {SIZES}',
    ],
    ids=lambda line: line.partition(' ')[0],
)
def test_bytes_of_a_file_without(run, line, file):
    """It would be far above all that the layers hold: nobody is told that this fits."""
    told = run(f'{line} {file} --memory-limit 60GiB', 2)[1]
    assert f'all layers of {file} hold' in told and 'activation and parameters in bytes' in told
    assert told.count('\n') == 1


def test_comparisons_leave_out_what_does_not_fit(run):
    line = f'compare {SIZES} --schedules 1f1b,zb-h2 --layers-file bytes.json --csv rows.csv'
    out, _ = run(f'{line} --memory-limit 17GiB')
    assert 'without zb-h2, even, at 0: a rank holds 20 GiB, above its memory\n' in out
    assert 'holds 20 GiB, above its memory, and no partition was found that fits\n' in out
    rows = csv.DictReader(Path('rows.csv').read_text().splitlines())
    assert {row['schedule'] for row in rows} == {'1f1b'}
    assert 'zb-h2, even' in run(f'{line} --memory-limit 21GiB')[0].partition('shortest')[0]
    Path('devices.json').write_text(json.dumps({'devices': [{'memory': 17 * GIB}] * 2}))
    assert 'a rank holds 20 GiB' in run(f'{line} --devices devices.json')[0]
    # in the unit of the file parameters count, too
    line = f'compare {SIZES} --schedules 1f1b,zb-h2 --layers-file units.json --memory-limit'
    assert 'without zb-h2, even, at 0: a rank holds 20, above' in run(f'{line} 16')[0]
    assert 'without' not in run(f'{line} 20')[0]


@pytest.mark.parametrize(('file', 'unit'), [('units.json', ''), ('bytes.json', 'GiB')])
def test_a_limit_means_the_same_to_each_command(run, file, unit):
    """Activations and parameters together, whether in bytes or not."""
    cases = {
        f'plan {SIZES} --vpp 1 --seconds 0.2 --no-cache --layers-file {file}': 12,
        f'partition {file} {SIZES} --placements loop --seconds 0.2': 12,
        f'partition {file} {SIZES} --strategy pipedream': 12,
        f'simulate --schedule 1f1b {SIZES} --layers-file {file}': 16,
        f'compare {SIZES} --schedules 1f1b --layers-file {file}': 15,  # on other layers
    }
    for line, least in cases.items():
        run(f'{line} --memory-limit {least}{unit}')
        told = run(f'{line} --memory-limit {least - 0.5:g}{unit}', 2)[1]
        assert told.count('\n') == 1, told


def test_the_output_layer_is_one_of_the_layers(run):
    line = f'simulate --schedule zb-v {SIZES} --layers-file bytes.json --vocab-parallel 0.3'
    assert 'the output layer is one of the layers' in run(line, 2)[1]
