"""Whatever is given to an option of `zbpp`: a result, or one line that names the option and a cure.

Each option of each command is found in the parser, so a new one is tested without a word here.
"""

import argparse
import contextlib
import io
import os
from pathlib import Path
from unittest import mock

import pytest
from command_lines import LINES, SHAPE, ended
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megatron_zbpp
from megatron_zbpp.cli import main
from megatron_zbpp.cli.parser import _COMMANDS, _parser
from megatron_zbpp.ir.strict_json import printable

# no number, count, share, amount of memory, name or file is any of these
WRONG = ('', ' ', 'x', '-1', 'nan', 'inf', '-inf', '1e308', '1e400', '٣', '1,,2', 'x=1', '1=')
WRONG += ('0x10', '1GiBi', 'no/such.json', 'folder', 'empty.json', 'other.json', 'a\x1b[2J')
WRONG += ('deep.json', 'bytes.json', 'tag.yaml', '9' * 5000, '\ud800')
# what some options may be, and others not
ODD = ('0', '1', '0.5', '2', '7', '9' * 30, '1,2', '1GiB', 'auto', 'all', 'half', 'balanced:2')
ODD += (
    'balanced:0', 'auto:0', 'plan.json', 'layers.json', 'times.json', 'zb-v', 'loop,v', 'FB=0.5',
)  # fmt: skip
WRITTEN = ('output', 'csv', 'write_devices', 'cache')  # files that need not be there
SLOW = {('plan', text) for text in ('7', '1,2', '9' * 30)}  # seconds of search
TEXTS = {'pattern', 'stages', 'title'}  # with a language of their own


def options() -> list[tuple[str, argparse.Action]]:
    """Each option with a value, and its command."""
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
    """Has files of each kind."""
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
MANY = int(os.environ.get('VALUES', 0))  # for hands; else the same draws each time
FEW = settings(
    max_examples=MANY or 40, derandomize=not MANY, suppress_health_check=list(HealthCheck)
)


@FEW
@given(st.sampled_from(DRAWN), st.sampled_from(WRONG + ODD) | st.text(max_size=6))
def test_any_value(folder, option, text):
    name, action = option
    clobbers = action.dest in WRITTEN and text.endswith('.json')
    if action.dest != 'seconds' and not clobbers and (name, text) not in SLOW:
        refused_or_done(line(name, action, text))
        if action.dest in WRITTEN and Path(text).is_file():
            Path(text).unlink()  # or another example reads it


@FEW
@given(st.sampled_from(DRAWN), st.sampled_from(WRONG))
def test_what_makes_no_sense_is_refused(folder, option, text):
    """Not taken in silence."""
    name, action = option
    if action.dest in (*WRITTEN, *TEXTS):
        return
    words = line(name, action, text)
    assert refused_or_done(words) == 2, (name, action.dest, text)
    told = ended(words)[2]
    assert action.option_strings[-1] in told or printable(text)[:15] in told, (words, told)


def test_all_commands_are_walked():
    assert set(LINES) | {'doctor', 'bench'} == {*_COMMANDS}
    assert len(OPTIONS) > 100
    for words in LINES.values():
        assert all(action is not None for action in words.split())


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
