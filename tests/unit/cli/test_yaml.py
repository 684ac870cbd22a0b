"""Costs, layers and devices as YAML: what JSON of the same gives, or one line and a cure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from megatron_zbpp.cli import main

SHAPE = '--pp 2 --microbatches 4'
SHOWN = f'simulate --schedule zb-h1 {SHAPE} --json --times'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def printed(line, capsys):
    assert main(line.split()) == 0
    return json.loads(capsys.readouterr().out)


def told(line, capsys):
    try:
        code = main(line.split())
    except SystemExit as end:
        code = end.code
    found = capsys.readouterr()
    assert code == 2 and not found.out and found.err.count('\n') == 1
    return found.err


def test_costs(capsys):
    Path('a.json').write_text('{"F": [1, 2], "B": [1, 1], "W": [0.5, 1], "comm": 0.25}')
    Path('a.yaml').write_text('F: [1, 2]\nB: [1, 1]\nW:\n- 0.5\n- 1\ncomm: 0.25  # of a message\n')
    assert printed(f'{SHOWN} a.yaml', capsys) == printed(f'{SHOWN} a.json', capsys)


def test_layers_devices_and_stages(capsys):
    line = 'profile --model gpt --num-layers 4 --hidden 64 --heads 2 --vocab 128 --seq 32'
    assert main([*line.split(), '--tflops', '1', '-o', 'layers.json']) == 0
    Path('devices.json').write_text(json.dumps({'devices': [{'name': 'a'}, {'factor': {'F': 2}}]}))
    Path('stages.json').write_text('{"F": [1, 2], "B": [1, 2], "W": [1, 2]}')
    for name in ('layers', 'devices', 'stages'):
        kept = json.loads(Path(f'{name}.json').read_text())
        Path(f'{name}.yml').write_text(yaml.safe_dump(kept))
    capsys.readouterr()
    search = '--microbatches 4 --placements loop --exact --json --devices'
    for line in (
        f'partition layers.{{0}} {search} devices.{{0}}',
        'profile --json --stages Et|ttL=stages.{0}',
    ):
        assert printed(line.format('yml'), capsys) == printed(line.format('json'), capsys)


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('F: [1, 2', 'no YAML of lists, numbers and names (while parsing a flow sequence'),
        ('F: [1, 2]\nB: [1, 1]\nF: [1, 1]\nW: [1, 1]', "key 'F' stands twice: leave one out"),
        ('F: [1, .inf]\nB: [1, 1]\nW: [1, 1]', 'Infinity'),
        ('F: [1, 2026-11-27]\nB: [1, 1]\nW: [1, 1]', 'date is not JSON serializable'),
        ('F: !!python/name:os.system []', 'no YAML of lists, numbers and names (could not'),
        ('- 1\n- 2', 'costs are one JSON object'),
        ('', 'costs are one JSON object'),
        ('a: &x [*x]', 'no YAML of lists'),
    ],
)
def test_what_makes_no_sense(text, said, capsys):
    Path('a.yaml').write_text(text)
    assert said in told(f'{SHOWN} a.yaml', capsys)


def test_without_the_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'yaml', None)
    Path('a.yaml').write_text('F: [1, 2]')
    cure = 'zbpp: a.yaml: YAML needs PyYAML: pip install pyyaml, or give JSON\n'
    assert told(f'{SHOWN} a.yaml', capsys) == cure
    assert told(f'partition a.yaml {SHAPE}', capsys) == cure
