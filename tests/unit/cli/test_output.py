"""What people and programs read: 80 columns, colour on a terminal only, JSON by its schema."""

import csv
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_lines import LINES, MODEL, SHAPE
from jsonschema import Draft202012Validator
from paths import ROOT

from megatron_zbpp import compare
from megatron_zbpp.cli import printing
from megatron_zbpp.cli.parser import _COMMANDS, _TABULAR
from megatron_zbpp.planner.figures import FORMATS, latex, markdown

SCHEMA = json.loads((ROOT / 'docs/zbpp.schema.json').read_text())
# lines of which the output is read, by people and by programs
PRINTED = Path(__file__).with_name('printed.txt').read_text().splitlines()

PARTS = {'schedule', 'invalid', 'costs', 'units'}
TAKE_MEGATRON = ('doctor', 'bench')
LOGGED = """
for step in 1 2
do echo " iteration $step/ 2 | elapsed time per iteration (ms): 12.5 | lm loss: 5.1E+00 |"
done
"""


@pytest.fixture
def read(zbpp, monkeypatch):
    """Runs lines of `zbpp` in a folder that has the files that are read."""
    monkeypatch.setenv('COLUMNS', '80')
    Path('times.json').write_text('{"F": [3, 2], "B": [3, 2], "W": [3, 2]}')
    Path('job.sh').write_text(LOGGED)
    zbpp(f'profile {MODEL} -o layers.json')
    zbpp(f'convert --schedule zb-h1 {SHAPE} --to json -o plan.json')
    return zbpp


def run(read, line: str) -> object:
    """What is printed of a line; `check` fails where a limit is not kept."""
    return read(line.replace("'", ''), code=2 if '--memory-limit' in line else 0)


def errors(name: str, value: object) -> list[str]:
    schema = {'$ref': f'#/$defs/{name}', '$defs': SCHEMA['$defs']}
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


@pytest.mark.parametrize('line', PRINTED)
def test_json_is_as_the_schema_says(line, read):
    """Each object, each of its names, and no other."""
    name, _, others = line.partition(' ')
    if name in TAKE_MEGATRON:  # Megatron may have been imported here, which it asks for CUDA
        command = [sys.executable, '-m', 'megatron_zbpp.cli', name, '--json', *others.split()]
        made = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    else:
        made = run(read, f'{name} --json {others}')
    assert not errors(name, made)
    assert errors(name, {**made, 'unknown': 1})
    first = next(iter(made))
    assert errors(name, {key: value for key, value in made.items() if key != first})


def test_each_command_has_a_schema():
    Draft202012Validator.check_schema(SCHEMA)
    assert {name for name, *_ in _COMMANDS} == set(SCHEMA['$defs']) - PARTS
    assert {name for name, *_ in _COMMANDS} == {line.split()[0] for line in PRINTED}
    from megatron_zbpp.launch.dry_run import DryRun
    from megatron_zbpp.mcore.job.model_shape import LayerMemory
    from megatron_zbpp.mcore.job.rules import Refusal

    refused = Refusal('fp8', 'e4m3', 'no TE', 'drop it')
    job = DryRun({'GPUs': 2}, layer=LayerMemory(34.0, 32.0, 1), refused=(refused,))
    report = {'fine': False, 'versions': {}, 'patches': [], 'launch_line': job.to_dict()}
    report |= {'missing_script': ''}
    assert not errors('doctor', json.loads(json.dumps(report)))


@pytest.mark.parametrize('line', [line for line in PRINTED if line.split()[0] not in TAKE_MEGATRON])
def test_tables_align_in_80_columns(line, read):
    """With each schedule that there is; cells of a column end at one place."""
    printed = run(read, line).splitlines()
    grids = [at for at in printed if at.startswith('rank 0 ')]  # of check: as long as its order
    assert not [at for at in printed if len(at) > 80 and not grids]


def test_colour_on_a_terminal_only():
    command = [sys.executable, '-m', 'megatron_zbpp.cli', *f'show --schedule zb-v {SHAPE}'.split()]
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=theirs, check=True)
    os.close(theirs)
    shown = b''
    while part := _read(ours):
        shown += part
    assert '\x1b[' not in piped and b'\x1b[' in shown


@pytest.mark.parametrize('terminal', [True, False])
def test_what_is_done_is_shown_on_a_terminal_only(terminal, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, 'isatty', lambda: terminal)
    monkeypatch.setattr(sys, 'stderr', stream)
    printing.now('reading the launch line ...')
    assert stream.getvalue() == ('\r\x1b[Kreading the launch line ...' if terminal else '')


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # all is read, and nobody writes any more
        return b''


@pytest.mark.parametrize(
    ('typed', 'offered'),
    [('pl', 'plan'), ('plan --fr', '--frontier'), ('plan --num', '--num-layers')],
)
def test_bash_completes(typed, offered, zbpp):
    Path('zbpp.bash').write_text(zbpp('--print-completion bash'))
    given = ['zbpp', *typed.split()]
    asked = (
        f'source zbpp.bash; COMP_WORDS=({" ".join(given)}); COMP_CWORD={len(given) - 1}; '
        '_shtab_zbpp; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(['bash', '-c', asked], capture_output=True, text=True, check=True)
    assert offered in done.stdout.split(), done


def test_completion_without_its_package(monkeypatch, zbpp):
    monkeypatch.setitem(sys.modules, 'shtab', None)
    zbpp('--print-completion zsh', code=2)
    assert 'pip install shtab' in zbpp.err


@pytest.mark.parametrize(
    ('line', 'old', 'new'),
    [
        (f'plan {SHAPE} --seconds 1 --layers 4 --no-cache', '--layers', '--num-layers'),
        (f'plan {SHAPE} --seconds 1 --placement v --no-cache', '--placement', '--placements'),
        (f'compare --layers layers.json {SHAPE} --schedules 1f1b', '--layers', '--layers-file'),
        (f'profile {MODEL}'.replace('--num-', '--'), '--layers', '--num-layers'),
    ],
)
def test_old_names_work_and_say_the_new(line, old, new, read):
    printed = read(line)
    assert read.err == f'zbpp: note: {old} is named {new} here: write that\n'
    assert read(line.replace(old + ' ', new + ' ')) == printed and read.err == ''


# ---- Tables as Markdown, CSV and LaTeX: of commands, and of rows in Python.


TABLES = {name: LINES[name] for name in sorted(_TABULAR - {'bench'})}
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
