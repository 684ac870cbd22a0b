"""What people and programs read: 80 columns, colour on a terminal only, JSON by its schema."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from paths import ROOT

from megatron_zbpp.cli import main, printing
from megatron_zbpp.cli.parser import _COMMANDS

SCHEMA = json.loads((ROOT / 'docs/zbpp.schema.json').read_text())
PROFILE = 'profile --model gpt --num-layers 4 --hidden 64 --heads 2 --vocab 128 --seq 32 --tflops 1'
ADVISE = 'advise --gpus 4 --memory 5GiB --count 3 --global-batch-size 8 --schedules 1f1b,zb-v'
SHAPE = '--pp 2 --microbatches 4'
JOB = (
    'doctor -- torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 4 --micro-batch-size 1 '
    '--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule'
)
PRINTED = (
    'list',
    f'show --schedule zb-v {SHAPE}',
    f'show --schedule zb-v {SHAPE} --order',
    f'simulate --schedule po-h {SHAPE}',
    'check plan.json',
    'check plan.json --memory-limit 0.5',
    f'compare {SHAPE}',
    'compare --layers-file layers.json --pp 2 --microbatches 4 --schedules zb-v,1f1b,zb-h1,gis',
    f'plan {SHAPE} --seconds 1',
    f'plan {SHAPE} --seconds 1 --layers-file layers.json',
    f'plan {SHAPE} --seconds 1 --frontier 1,2',
    f'partition layers.json {SHAPE} --seconds 1',
    f'partition layers.json {SHAPE} --strategy spp',
    PROFILE,
    "profile --stages 'Ett|ttL=times.json'",
    f'bubbles --schedule 1f1b {SHAPE}',
    f'freeze --schedule zb-h1 {SHAPE}',
    'doctor',
    f'{JOB} zb-v',
    'bench --rounds 1 --iterations 2 --schedules zb-v -- sh job.sh megatron_zbpp.launch job.py',
    f'{ADVISE} {PROFILE.removeprefix("profile ")}',
    'page --pp 2 --microbatches 4 --vpp 2 -o page.html',
    f'convert --schedule zb-v {SHAPE} --to torch-csv -o other.csv',
)

PARTS = {'schedule', 'invalid', 'costs', 'units'}
TAKE_MEGATRON = ('doctor', 'bench')
LOGGED = """
for step in 1 2
do echo " iteration $step/ 2 | elapsed time per iteration (ms): 12.5 | lm loss: 5.1E+00 |"
done
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Has the files that are read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setenv('COLUMNS', '80')
    (tmp_path / 'times.json').write_text('{"F": [3, 2], "B": [3, 2], "W": [3, 2]}')
    assert main([*PROFILE.split(), '-o', 'layers.json']) == 0
    (tmp_path / 'job.sh').write_text(LOGGED)
    assert main(f'convert --schedule zb-h1 {SHAPE} --to json -o plan.json'.split()) == 0
    return tmp_path


def words(line: str, *more: str) -> list[str]:
    name, *others = line.replace("'", '').split()
    return [name, *more, *others]


def errors(name: str, value: object) -> list[str]:
    schema = {'$ref': f'#/$defs/{name}', '$defs': SCHEMA['$defs']}
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


@pytest.mark.parametrize('line', PRINTED)
def test_json_is_as_the_schema_says(line, folder, capsys):
    """Each object, each of its names, and no other."""
    name = line.split()[0]
    if name in TAKE_MEGATRON:  # Megatron may have been imported here, which it asks for CUDA
        command = [sys.executable, '-m', 'megatron_zbpp.cli', *words(line, '--json')]
        text = subprocess.run(command, capture_output=True, text=True).stdout
    else:
        capsys.readouterr()
        main(words(line, '--json'))
        text = capsys.readouterr().out
    made = json.loads(text)
    assert not errors(name, made)
    assert errors(name, {**made, 'unknown': 1})
    first = next(iter(made))
    assert errors(name, {key: value for key, value in made.items() if key != first})


def test_each_command_has_a_schema():
    Draft202012Validator.check_schema(SCHEMA)
    assert {name for name, *_ in _COMMANDS} == set(SCHEMA['$defs']) - PARTS
    assert {name for name, *_ in _COMMANDS} == {line.split()[0] for line in PRINTED}


def test_what_doctor_refuses():
    from megatron_zbpp.mcore.command_line.dry_run import DryRun
    from megatron_zbpp.mcore.command_line.layer_memory import LayerMemory
    from megatron_zbpp.mcore.job.rules import Refusal

    refused = Refusal('fp8', 'e4m3', 'no TE', 'drop it')
    job = DryRun({'GPUs': 2}, layer=LayerMemory(34.0, 32.0, 1), refused=(refused,))
    report = {'fine': False, 'versions': {}, 'patches': [], 'launch_line': job.to_dict()}
    report |= {'missing_script': ''}
    assert not errors('doctor', json.loads(json.dumps(report)))


@pytest.mark.parametrize('line', [line for line in PRINTED if line.split()[0] not in TAKE_MEGATRON])
def test_tables_align_in_80_columns(line, folder, capsys):
    """With each schedule that there is; cells of a column end at one place."""
    capsys.readouterr()
    main(words(line))
    printed = capsys.readouterr().out.splitlines()
    grids = [at for at in printed if at.startswith('rank 0 ')]  # of check: as long as its order
    assert not [at for at in printed if len(at) > 80 and not grids]


def test_colour_on_a_terminal_only(folder):
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
def test_bash_completes(typed, offered, folder, capsys):
    with pytest.raises(SystemExit):
        main(['--print-completion', 'bash'])
    Path('zbpp.bash').write_text(capsys.readouterr().out)
    given = ['zbpp', *typed.split()]
    asked = (
        f'source zbpp.bash; COMP_WORDS=({" ".join(given)}); COMP_CWORD={len(given) - 1}; '
        '_shtab_zbpp; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(['bash', '-c', asked], capture_output=True, text=True, check=True)
    assert offered in done.stdout.split(), done


def test_completion_without_its_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'shtab', None)
    with pytest.raises(SystemExit) as left:
        main(['--print-completion', 'zsh'])
    assert left.value.code == 2
    assert 'pip install shtab' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('line', 'old', 'new'),
    [
        (f'plan {SHAPE} --seconds 1 --layers 4 --no-cache', '--layers', '--num-layers'),
        (f'plan {SHAPE} --seconds 1 --placement v --no-cache', '--placement', '--placements'),
        (f'compare --layers layers.json {SHAPE} --schedules 1f1b', '--layers', '--layers-file'),
        (PROFILE.replace('--num-layers', '--layers'), '--layers', '--num-layers'),
    ],
)
def test_old_names_work_and_say_the_new(line, old, new, folder, capsys):
    """They print the same."""
    capsys.readouterr()
    assert main(words(line)) == 0
    first = capsys.readouterr()
    assert first.err == f'zbpp: note: {old} is named {new} here: write that\n'
    assert main(words(line.replace(old + ' ', new + ' '))) == 0
    again = capsys.readouterr()
    assert (again.out, again.err) == (first.out, '')
