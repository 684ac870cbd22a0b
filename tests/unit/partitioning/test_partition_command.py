"""`zbpp partition`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from instances import NODES, P1, P4

from megatron_zbpp.cli import main
from megatron_zbpp.ir.formats import load, load_plan
from megatron_zbpp.partitioning import plans

KEYS = {
    'makespan', 'window', 'lower_bound', 'cuts', 'device_order', 'layout', 'peak_activations',
    'schedule', 'costs', 'units', 'layers', 'devices',
}  # fmt: skip


@pytest.fixture
def case(tmp_path: Path) -> list[str]:
    file = tmp_path / 'layers.json'
    file.write_text(P1.to_json())
    return ['partition', str(file), '--microbatches', '4']


def test_json_is_one_object(case, capsys):
    assert main([*case, '--pp', '4', '--placements', 'loop', '--exact', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == KEYS
    assert (found['makespan'], found['lower_bound'], found['cuts']) == (65, 65, [3, 2, 2, 1])
    assert found['layout'] == 'Ett|tt|tt|L' and found['device_order'] == [0, 1, 2, 3]
    assert len(found['peak_activations']) == 4


def test_plan_for_people_and_for_megatron(case, capsys, tmp_path):
    plan = tmp_path / 'plan.json'
    assert main([*case, '--pp', '4', '--seconds', '1', '-o', str(plan)]) == 0
    said = capsys.readouterr().out
    assert 'layout Ett|tt|tt|L' in said
    assert 'even split with 1f1b: 104; this takes 37.5% less' in ' '.join(said.split())
    assert 'ended the search' not in said
    assert load_plan(plan).schedule.num_stages == 4
    assert load_plan(plan).layout == 'Ett|tt|tt|L'
    assert main(['check', str(plan)]) == 0
    assert (
        main(['convert', '--file', str(plan), '--to', 'torch-csv', '-o', str(plan) + '.csv']) == 0
    )
    assert load(str(plan) + '.csv').passes == load(plan).passes
    assert load_plan(str(plan) + '.csv').layout is None


HEAVY = [
    {'kind': 'E', 'F': 1, 'W': 1},
    {'kind': 't', 'count': 14, 'F': 4, 'B': 4, 'W': 3},
    {'kind': 'L', 'F': 9, 'B': 9, 'W': 9},
]


def test_what_it_holds_beside_the_even_split(tmp_path, capsys):
    """More than that by its memory, too; and what more time might bring."""
    file = tmp_path / 'layers.json'
    file.write_text(json.dumps({'format': 'megatron_zbpp.layers/1', 'layers': HEAVY}))
    given = ['partition', str(file), '--pp', '4', '--microbatches', '8', '--seconds', '1']
    assert main([*given, '--placements', 'v']) == 0
    said = ' '.join(capsys.readouterr().out.split())
    bound, value = (
        float(re.search(rf'{word} (\d+)', said)[1]) for word in ('all partitions', 'makespan')
    )
    held = re.search(r'even split with 1f1b: 603; this takes .* less(, and holds .*:|) ?', said)
    most = max(int(own) for own in re.findall(r'[tEL]+ \d+ (\d+)', said))
    assert (most > 16) == bool(held[1]), '1F1B holds four microbatches of four layers'
    assert not held[1] or f'{most / 16:.1f} times its activations: --memory-limit' in said
    clock = f'another plan, up to {1 - bound / value:.1%} faster; with more --seconds'
    assert (clock in said) == (value > bound)
    assert main([*given, '--memory-limit', '40']) == 0
    assert '--memory-limit' not in capsys.readouterr().out


@pytest.mark.parametrize('kind', ['svg', 'html', 'png'])
def test_pictures(case, tmp_path, kind, capsys):
    picture = tmp_path / f'plan.{kind}'
    v = ['--placements', 'v', '--pp', '2']
    assert main([*case, *v, '--seconds', '1', '-o', str(picture)]) == 0
    assert picture.stat().st_size > 1000
    assert 'runs this with the ranks reversed' in capsys.readouterr().out


def test_devices_and_limits(tmp_path, capsys):
    layers, devices = tmp_path / 'layers.json', tmp_path / 'devices.json'
    layers.write_text(P4.to_json())
    devices.write_text(NODES.to_json())
    given = ['partition', str(layers), '--devices', str(devices), '--microbatches', '4', '--json']
    assert main([*given, '--placements', 'loop', '--fused']) == 0
    assert json.loads(capsys.readouterr().out)['makespan'] == 92
    assert main([*given, '--schedules', '1f1b', '--keep-order']) == 0
    assert json.loads(capsys.readouterr().out)['makespan'] == 118


@pytest.mark.parametrize(
    ('more', 'said'),
    [
        ([], '--pp or --devices'),
        (['--pp', '4', '--placements', 'ring'], '--placements ring'),
        (['--pp', '4', '--placements', 'v3'], '--placements v3'),
        (['--pp', '4', '--memory-limit', '1'], 'no partition holds'),
        (['--pp', '4', '--schedules', 'zb-w'], "unknown schedule 'zb-w'"),
        (['--pp', '4', '--devices', 'nowhere.json'], 'nowhere.json'),
        (['--pp', '4', '-o', 'plan.txt'], 'name .json for the plan, or .html, .svg, .png, .pdf'),
    ],
)
def test_what_cannot_be(case, capsys, more, said):
    assert main([*case, *more]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count('\n') == 1


def test_interrupted(case, capsys, monkeypatch):
    """The best by then, and the exit code of Ctrl-C."""
    found = plans.partition(P1, 4, 4, seconds=1)

    def interrupted(*args, **kwargs):
        raise plans.PartitionInterrupted(found)

    monkeypatch.setattr('megatron_zbpp.cli.partitioning.partition', interrupted)
    assert main([*case, '--pp', '4', '--json']) == 130
    printed = capsys.readouterr()
    assert json.loads(printed.out)['makespan'] == found.value and 'interrupted' in printed.err
