"""Whatever is in a file that is named to us: it is read, or refused in one line with its path.

Each reader gets files of its own with something changed, cut off or inserted, any values of JSON
and YAML, and any bytes; each command gets some of them. More examples are for hands:

    FILES=2000 pytest tests/unit/cli/test_any_file.py
"""

import argparse
import contextlib
import gzip
import io
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml
from command_lines import LINES, SHAPE, ended
from documents import ODD, changed, places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instances import NODES
from instances import P1 as LAYERS
from nsight_report import report

import megatron_zbpp
from megatron_zbpp import build
from megatron_zbpp.cli import benching, main, profiling
from megatron_zbpp.cli.arguments import load_devices, load_layers
from megatron_zbpp.cli.parser import _COMMANDS, _parser
from megatron_zbpp.ir import formats
from megatron_zbpp.ir.strict_json import printable
from megatron_zbpp.partitioning.freeze_plans import plan_of
from megatron_zbpp.partitioning.measured_files import read_times
from megatron_zbpp.planner.cost_sources import StageCosts

RECORDED = Path(__file__).parents[1] / 'partitioning' / 'recorded'
MANY = int(os.environ.get('FILES', 0))
FEW = settings(
    max_examples=MANY or 25, derandomize=not MANY, suppress_health_check=list(HealthCheck)
)
SCHEDULE = build('zb-v', 2, 4).to_json()
COSTS = {'F': [1, 2], 'B': [1, 1], 'W': [1, 1], 'activation': [1, 1], 'comm': 0.5}
STAGES = {**COSTS, 'layout': 'Et|tL', 'routes': [[0, 1]]}
RUNS = {'line': ['a'], 'iterations': 4, 'runs': {'stock': []}}


# 26 million values in five lines
ALIASES = 'a0: &a0 [1, 1]\n' + ''.join(
    f'a{k + 1}: &a{k + 1} [{f"*a{k}, " * 60}]\n' for k in range(4)
)


class Reader(NamedTuple):
    """A reader, documents that it takes, and commands with the option that names its file."""

    read: Callable[[str], object]
    takes: tuple[str | bytes, ...]
    commands: list[str]


def printed(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*words, '-o', 'written.json']) == 0
    return Path('written.json').read_text()


def recorded(name: str) -> str:
    """A trace of a rank, its first events."""
    trace = json.loads(gzip.decompress((RECORDED / name).read_bytes()))
    return json.dumps({**trace, 'traceEvents': trace['traceEvents'][:60]})


@pytest.fixture(scope='module')
def readers(tmp_path_factory):
    """Readers by name, in a folder with a file of layers."""
    folder, before = tmp_path_factory.mktemp('files'), Path.cwd()
    os.chdir(folder)
    Path('layers.json').write_text(LAYERS.to_json())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('XDG_CACHE_HOME', str(folder))
        plan = printed(*f'plan {SHAPE} --seconds 0.05'.split())
        own = f'partition layers.json {SHAPE} --seconds 0.05'.split()
        parted, freezing = printed(*own), printed(*f'freeze --schedule zb-h1 {SHAPE}'.split())
        timers = (RECORDED / 'timers-all.log').read_text()[:4000]
        of_1f1b = f'--schedule 1f1b {SHAPE}'
        checked = ['check', 'show --file', 'simulate --file', 'compare --schedules 1f1b --file']
        checked += ['convert -o out.csv --file', 'freeze --file', 'bubbles --file']
        timed = [f'simulate {of_1f1b} --times', f'freeze {of_1f1b} --times']
        timed += [f'plan {SHAPE} --seconds 0.02 --times']
        timed += [f'compare --schedules 1f1b {SHAPE} --times']
        layered = [f'partition {SHAPE} --seconds 0.02', f'show {of_1f1b} --layers-file']
        layered += [f'compare --schedules 1f1b {SHAPE} --layers-file']
        schedules = SCHEDULE, plan, parted, '0F0,,0B0\n1F0,1B0\n'
        costs = json.dumps(COSTS), json.dumps({**STAGES, 'times': {}, 'amounts': {}})
        measured = json.dumps(STAGES), recorded('vpp-0.json.gz'), recorded('zbh1-0.json.gz'), timers
        whole = (RECORDED / 'stock-0.json.gz').read_bytes(), report(Path('whole')).read_bytes()
        on_devices = ['partition layers.json --microbatches 4 --seconds 0.02 --devices']
        yield {
            'schedule': Reader(formats.load_plan, schedules, checked),
            'costs': Reader(StageCosts.read, costs, timed),
            'layers': Reader(load_layers, (LAYERS.to_json(), parted), layered),
            'devices': Reader(
                lambda path: load_devices(path, None), (NODES.to_json(), parted), on_devices
            ),
            'freezing': Reader(plan_of, (freezing,), []),
            'stages': Reader(
                lambda path: profiling._measured(f'Et|tL={path}'),
                (json.dumps(STAGES),),
                ['profile --stages Et|tL='],
            ),
            'times': Reader(
                lambda path: read_times([path], 'Et|tL'),
                (*measured, *whole),
                ['profile', 'profile --layout Et|tL'],
            ),
            'runs': Reader(
                lambda path: benching._Runs(Path(path).parent, ['a'], 4), (json.dumps(RUNS),), []
            ),
        }
    os.chdir(before)


NAMES = ('schedule', 'costs', 'layers', 'devices', 'freezing', 'stages', 'times', 'runs')
SCALARS = ODD | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside),
    max_leaves=8,
)
MARKS = (
    '[' * 100_000, '{"a":' * 100_000, '\0', ',', '"', '&a ', '*a', '!!int ""', '\ufeff', '9' * 5000,
)  # fmt: skip
WHOLE = (
    b'', b'\xff\xfe', b'\x1f\x8b\x08', b'SQLite format 3\0', '\ufeff{}'.encode(), b'null', b'- 1',
)  # fmt: skip


@st.composite
def contents(draw: Any, takes: tuple[str | bytes, ...]) -> bytes:
    kind = draw(
        st.sampled_from(['changed', 'changed', 'cut', 'inserted', 'value', 'yaml', 'bytes'])
    )
    text = draw(st.sampled_from(takes))
    if kind == 'bytes':
        return draw(st.sampled_from(WHOLE) | st.binary(max_size=40))
    if kind == 'value':
        return json.dumps(draw(VALUES)).encode()
    if kind in ('changed', 'yaml') and isinstance(text, str) and text.startswith('{'):
        original = json.loads(text)
        path = draw(st.sampled_from([*places(original)]))
        how = draw(st.sampled_from(['replaced', 'gone', 'added']))
        document = changed(original, path, how, draw(ODD | VALUES))
        if kind == 'changed' or len(text) > 10_000:
            return json.dumps(document).encode()
        return yaml.safe_dump(document).encode('utf-8', 'surrogatepass')
    whole = text if isinstance(text, bytes) else text.encode()
    at = draw(st.integers(0, len(whole)))
    end = b'' if kind == 'cut' else draw(st.sampled_from(MARKS)).encode() + whole[at:]
    return whole[:at] + end


def require_line(told: str, path: str) -> None:
    assert (path in told or 'stage' in told) and told.isprintable(), told


@pytest.mark.parametrize('name', NAMES)
@FEW
@given(data=st.data())
def test_a_reader_reads_or_refuses(readers, name, data):
    reader = readers[name]
    ends = ('json', 'yaml', 'json.gz') if name not in ('freezing', 'runs') else ('json',)
    path = 'runs.json' if name == 'runs' else f'any.{data.draw(st.sampled_from(ends))}'
    Path(path).write_bytes(data.draw(contents(reader.takes)))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            reader.read(path)
        except ValueError as error:
            if name != 'runs':
                require_line(str(error).partition('\n')[0], path)


@pytest.mark.parametrize('name', [name for name in NAMES if name not in ('freezing', 'runs')])
@FEW
@given(data=st.data())
def test_a_command_reads_or_refuses(readers, name, data):
    path, command = 'any.json', data.draw(st.sampled_from(readers[name].commands))
    Path(path).write_bytes(data.draw(contents(readers[name].takes)))
    words = f'{command}{path}' if command.endswith('=') else f'{command} {path}'
    code, _, said = ended(words.split())
    assert code in (0, 2), (words, code, said)
    errors = said.splitlines()
    assert code == 0 or len(errors) == 1, (words, errors)
    for line in errors:
        assert line.startswith('zbpp') and ': ' in line and line.isprintable(), (words, line)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize(
    ('file', 'content'),
    [
        ('any.json', '[' * 100_000), ('any.json', '{"a":' * 100_000),
        ('any.json', '[' * 900 + ']' * 900), ('any.yaml', '[' * 100_000), ('any.yaml', ALIASES),
        ('any.yaml', 'F: !!int ""'), ('any.yaml', '&a [*a]'), ('any.json', '{"a": 1, "a": 2}'),
        ('any.json', '{"a\\u001b": 1}'), ('any.json', '[1e999]'), ('any.json', f'[1{"0" * 18}]'),
    ],
    ids='lists objects flat YAML aliases tag itself twice control infinite huge'.split(),
)  # fmt: skip
def test_what_no_reader_takes(readers, name, file, content):
    """Each was a traceback of some reader once, or hours."""
    file = 'runs.json' if name == 'runs' else file
    Path(file).write_text(content)
    with pytest.raises(ValueError) as error:
        readers[name].read(file)
    if name != 'runs':
        require_line(str(error.value), file)
    read_by_yaml = content == ALIASES and name not in ('runs', 'times')
    assert not read_by_yaml or 'leave aliases out' in str(error.value)


@pytest.mark.parametrize('name', [name for name in NAMES if name not in ('runs', 'times')])
def test_what_is_not_there(readers, name):
    """The system's words, and what to give instead."""
    for path in ('none.json', '.'):
        with pytest.raises((OSError, ValueError)) as error:
            readers[name].read(path)
        told = getattr(error.value, 'strerror', None) or str(error.value)
        assert ': give ' in told, told


def test_an_endless_file(readers):
    """Reading ends where a file of ours would."""
    with pytest.raises(ValueError, match='/dev/zero: more than 268435456 bytes: give a shorter'):
        readers['costs'].read('/dev/zero')


# ---- Whatever is given to an option: a result, or one line that names the option and a cure.


# no number, count, share, amount of memory, name or file is any of these
WRONG = ('', ' ', 'x', '-1', 'nan', 'inf', '-inf', '1e308', '1e400', '٣', '1,,2', 'x=1', '1=')
WRONG += ('0x10', '1GiBi', 'no/such.json', 'folder', 'empty.json', 'other.json', 'a\x1b[2J')
WRONG += ('deep.json', 'bytes.json', 'tag.yaml', '9' * 5000, '\ud800')
# what some options may be, and others not
SOME = ('0', '1', '0.5', '2', '7', '9' * 30, '1,2', '1GiB', 'auto', 'all', 'half', 'balanced:2')
SOME += (
    'balanced:0', 'auto:0', 'plan.json', 'layers.json', 'times.json', 'zb-v', 'loop,v', 'FB=0.5',
)  # fmt: skip
WRITTEN = ('output', 'csv', 'write_devices', 'cache')  # files that need not be there
SLOW = {('plan', text) for text in ('7', '1,2', '9' * 30)}  # seconds of search
TEXTS = {'pattern', 'stages', 'title'}  # with a language of their own


def options() -> list[tuple[str, argparse.Action]]:
    (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return [
        (name, action)
        for name, parser in commands.choices.items()
        if name in LINES
        for action in parser._actions
        if action.option_strings and action.nargs != 0 and action.help is not argparse.SUPPRESS
    ]


OPTIONS = options()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp('files'), Path.cwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setenv('XDG_CACHE_HOME', str(folder))
        Path('folder').mkdir()
        Path('empty.json').touch()
        Path('other.json').write_text('{"a": [1]}')
        Path('deep.json').write_text('[' * 100_000)
        Path('bytes.json').write_bytes(bytes(range(256)))
        Path('tag.yaml').write_text('F: !!int ""')
        Path('times.json').write_text('{"F": [1, 1], "B": [1, 1], "W": [1, 1]}')
        assert main([*LINES['profile'].split(), '-o', 'layers.json']) == 0
        assert main('convert --schedule zb-v --pp 2 --microbatches 4 -o plan.json'.split()) == 0
        yield folder
        os.chdir(before)


def refused_or_done(words: list[str]) -> int:
    code, out, errors = ended(words)
    assert code in (0, 2), (words, code, errors)
    if code == 0:
        assert out, words
    else:
        assert errors.count('\n') == 0 and errors.startswith('zbpp'), (words, errors)
        assert ':' in errors and errors.isprintable(), (words, errors)
    return code


def line(name: str, action: argparse.Action, text: str) -> list[str]:
    words, flag = LINES[name].split(), action.option_strings[-1]
    if flag in words:
        at = words.index(flag)
        words[at : at + 2] = []
    if action.dest == 'file':
        words = [name]
    return [*words, f'{flag}={text}' if flag.startswith('--') else f'{flag}{text}']


DRAWN = [each for each in OPTIONS for _ in range(1 if each[0] == 'plan' else 3)]


@settings(FEW, max_examples=MANY or 80)
@given(st.sampled_from(DRAWN), st.sampled_from(WRONG) | st.sampled_from(SOME) | st.text(max_size=6))
def test_any_value(folder, option, text):
    """What makes no sense is refused, and not taken in silence."""
    name, action = option
    words, wrong = line(name, action, text), text in WRONG
    clobbers = action.dest in WRITTEN and text.endswith('.json')
    if clobbers or (not wrong and (action.dest == 'seconds' or (name, text) in SLOW)):
        return
    code = refused_or_done(words)
    if action.dest in WRITTEN and Path(text).is_file():
        Path(text).unlink()  # or another example reads it
    if wrong and action.dest not in (*WRITTEN, *TEXTS):
        told = ended(words)[2]
        assert code == 2, (name, action.dest, text)
        assert action.option_strings[-1] in told or printable(text)[:15] in told, (words, told)


def test_all_commands_are_walked():
    assert set(LINES) | {'doctor', 'bench'} == {name for name, *_ in _COMMANDS}
    assert len(OPTIONS) > 100


def test_a_file_that_is_not_there_in_python(tmp_path):
    for path in (tmp_path / 'none.json', tmp_path):
        with pytest.raises(OSError, match=r'y: give a schedule or a plan, as .*') as error:
            megatron_zbpp.load(path)
        assert error.value.filename == str(path) and error.value.errno
    with pytest.raises(FileNotFoundError):
        megatron_zbpp.load('none.json')


def test_a_package_that_is_not_here_is_named_with_its_cure(monkeypatch, capsys):
    missing = ModuleNotFoundError("No module named 'torch'", name='torch')
    absent = mock.Mock(side_effect=missing)
    monkeypatch.setattr('megatron_zbpp.planner.cases.CaseRequest.case', absent)
    assert main(f'show --schedule zb-v {SHAPE}'.split()) == 2
    cure = 'pip install torch, or run zbpp where the job runs'
    assert capsys.readouterr().err == f"zbpp: No module named 'torch': {cure}\n"


READ_WITH_LAYERS = {'schedules', 'num_ranks', 'num_microbatches', 'layers', 'devices'}
READ_WITH_LAYERS |= {'latencies', 'csv', 'table', 'memory_limit'}
NOT_WITH_LAYERS = {  # costs are the default, but given
    'file': 'plan.json', 'output': 'rows.html', 'costs': '1,1,1', 'comm': '1', 'num_chunks': '2',
    'together': '0.8', 'slices': '2', 'seq_length': '64', 'attention': '0.3',
    'context_exchange': '1', 'vocab_parallel': '0.3', 'vocab_layers': 'input+output',
    'against': 'interleaved', 'title': 'Mine',
}  # fmt: skip


def test_layers_leave_no_option_unread(folder):
    """Comparing on partitions refuses each option that it does not read, by its name."""
    own = {a.dest: a.option_strings[-1] for name, a in OPTIONS if name == 'compare'}
    assert {*own} == READ_WITH_LAYERS | {*NOT_WITH_LAYERS}
    for name, value in NOT_WITH_LAYERS.items():
        words = f'compare --layers-file layers.json --schedules 1f1b {SHAPE} {own[name]}'.split()
        code, out, errors = ended([*words, value])
        assert code == 2 and not out and f'{own[name]} does not go' in errors, (name, errors)
        assert errors.count('\n') == 0, errors


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='no /dev/full here')
def test_a_full_disk_names_the_file(folder):
    code, _, errors = ended(f'convert --schedule zb-v {SHAPE} --to json -o /dev/full'.split())
    assert code == 2 and errors.startswith('zbpp: /dev/full: No space left on device: give ')
