"""Tables as Markdown, CSV and LaTeX: of commands, and of rows in Python."""

from __future__ import annotations

import csv
import io

import pytest

from megatron_zbpp import compare
from megatron_zbpp.cli import main
from megatron_zbpp.cli.parser import _TABULAR
from megatron_zbpp.ir.tables import FORMATS, latex, markdown

SHAPE = '--pp 2 --microbatches 4'
LINES = {
    'list': 'list',
    'simulate': f'simulate --schedule zb-v {SHAPE}',
    'compare': f'compare --schedules zb-v,1f1b {SHAPE}',
    'plan': f'plan {SHAPE} --seconds 0.02 --frontier 2,3',
    'partition': f'partition layers.json {SHAPE} --placements loop --exact',
    'profile': 'profile --model gpt --num-layers 4 --hidden 64 --heads 2 --vocab 128 --seq 32 '
    '--tflops 1 -o layers.json',
    'bubbles': f'bubbles --schedule 1f1b {SHAPE}',
    'freeze': f'freeze --schedule zb-h1 {SHAPE}',
    'advise': 'advise --gpus 4 --memory 5GiB --global-batch-size 8 --schedules 1f1b,zb-v --model '
    'gpt --num-layers 4 --hidden 64 --heads 2 --vocab 128 --seq 32 --tflops 1',
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))


def printed(line, capsys):
    assert main(line.split()) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize('command', LINES)
def test_a_command_prints_its_table_alone(command, capsys):
    """The same cells in each format, and in the output that people read."""
    printed(LINES['profile'], capsys)
    found = {to: printed(f'{LINES[command]} --table {to}', capsys) for to in FORMATS}
    heads, *rows = csv.reader(io.StringIO(found['csv']))
    assert rows and all(len(row) == len(heads) for row in rows)
    assert found['md'] == markdown(heads, rows) + '\n'
    assert found['latex'] == latex(heads, rows) + '\n'
    if command != 'list':  # which has no table otherwise
        assert found['text'] in printed(LINES[command], capsys)


def test_every_command_with_a_table_is_walked():
    assert set(LINES) | {'bench'} == _TABULAR


def test_no_table(capsys):
    assert main(f'plan {SHAPE} --seconds 0.02 --table md'.split()) == 2
    found = capsys.readouterr()
    assert not found.out
    assert found.err.endswith('--table md: with these options there is no table: leave it out\n')


def test_one_of_json_and_a_table(capsys):
    with pytest.raises(SystemExit):
        main(['list', '--json', '--table', 'md'])
    assert 'not allowed with argument --json' in capsys.readouterr().err


def test_signs_that_mean_something():
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


def test_rows_in_python():
    rows = compare(2, 4, ['zb-v', '1f1b'])
    assert [*rows] == list(rows) and rows[0].name == 'zb-v'
    heads, *lines = csv.reader(io.StringIO(rows.to('csv')))
    assert heads == [*rows[0]._fields] and [line[0] for line in lines] == ['zb-v', '1f1b']
    assert str(rows) == rows.to('text') and rows.to('md') == markdown(heads, lines)
    with pytest.raises(ValueError, match=r"no table as 'pdf': give text, md, csv, latex"):
        rows.to('pdf')
