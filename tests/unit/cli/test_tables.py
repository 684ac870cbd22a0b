"""Tables as Markdown, CSV and LaTeX: of commands, and of rows in Python."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from command_lines import LINES, SHAPE

from megatron_zbpp import compare
from megatron_zbpp.cli.parser import TABLE
from megatron_zbpp.planner.figures import FORMATS, latex, markdown

TABLES = {row['name']: LINES[row['name']] for row in TABLE if row['tabular']}
del TABLES['bench']
TABLES['plan'] += ' --frontier 2,3'
TABLES['partition'] = f'partition layers.json {SHAPE} --placements loop --exact'
TABLES['profile'] += ' -o layers.json'


@pytest.mark.parametrize('command', TABLES)
def test_a_command_prints_its_table_alone(command, zbpp):
    """The same cells in each format, and in the output that people read."""
    zbpp(TABLES['profile'])
    found = {to: zbpp(f'{TABLES[command]} --table {to}') for to in FORMATS}
    heads, *rows = csv.reader(io.StringIO(found['csv']))
    assert rows and all(len(row) == len(heads) for row in rows)
    assert found['md'] == markdown(heads, rows) + '\n'
    assert found['latex'] == latex(heads, rows) + '\n'
    if command != 'list':  # which has no table otherwise
        assert found['text'] in zbpp(TABLES[command])


def test_tables_in_python():
    assert markdown(('a|b', 'c'), [('d|e', '5%')]).splitlines()[::2] == [
        r'| a\|b | c |',
        r'| d\|e | 5% |',
    ]
    assert latex(('a_b', 'c'), [('50%', '\\~{')]).splitlines()[:4] == [
        r'\begin{tabular}{lr}',
        r'a\_b & c \\',
        r'\hline',
        r'50\% & \textbackslash{}\textasciitilde{}\{ \\',
    ]
    rows = compare(2, 4, ['zb-v', '1f1b'])
    assert [*rows] == list(rows) and rows[0].name == 'zb-v'
    heads, *lines = csv.reader(io.StringIO(rows.to('csv')))
    assert heads == [*rows[0]._fields] and [line[0] for line in lines] == ['zb-v', '1f1b']
    assert str(rows) == rows.to('text') and rows.to('md') == markdown(heads, lines)
    with pytest.raises(ValueError, match=r"no table as 'pdf': give text, md, csv, latex"):
        rows.to('pdf')


# ---- Costs, layers and devices as YAML: what JSON of the same gives, or one line and a cure.


SHOWN = f'simulate --schedule zb-h1 {SHAPE} --json --times'


def test_yaml(zbpp):
    Path('a.json').write_text('{"F": [1, 2], "B": [1, 1], "W": [0.5, 1], "comm": 0.25}')
    Path('a.yaml').write_text('F: [1, 2]\nB: [1, 1]\nW:\n- 0.5\n- 1\ncomm: 0.25  # of a message\n')
    assert zbpp(f'{SHOWN} a.yaml') == zbpp(f'{SHOWN} a.json')
    zbpp(TABLES['profile'])
    Path('devices.json').write_text(json.dumps({'devices': [{'name': 'a'}, {'factor': {'F': 2}}]}))
    Path('stages.json').write_text('{"F": [1, 2], "B": [1, 2], "W": [1, 2]}')
    for name in ('layers', 'devices', 'stages'):
        kept = json.loads(Path(f'{name}.json').read_text())
        Path(f'{name}.yml').write_text(yaml.safe_dump(kept))
    search = '--microbatches 4 --placements loop --exact --json --devices'
    for line in (
        f'partition layers.{{0}} {search} devices.{{0}}',
        'profile --json --stages Et|ttL=stages.{0}',
    ):
        assert zbpp(line.format('yml')) == zbpp(line.format('json'))


def test_without_the_package(monkeypatch, zbpp):
    monkeypatch.setitem(sys.modules, 'yaml', None)
    Path('a.yaml').write_text('F: [1, 2]')
    cure = 'zbpp: a.yaml: YAML needs PyYAML: pip install pyyaml, or give JSON\n'
    assert zbpp.refused(f'{SHOWN} a.yaml') == cure
    assert zbpp.refused(f'partition a.yaml {SHAPE}') == cure
