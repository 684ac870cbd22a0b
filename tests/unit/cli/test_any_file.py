"""Whatever is in a file that is named to us: it is read, or refused in one line with its path.

Each reader gets files of its own with something changed, cut off or inserted, any values of JSON
and YAML, and any bytes; each command gets some of them. More examples are for hands:

    FILES=2000 pytest tests/unit/cli/test_any_file.py
"""

import contextlib
import gzip
import io
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from command_lines import SHAPE, ended
from documents import ODD, changed, places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instances import NODES
from instances import P1 as LAYERS

from megatron_zbpp import build
from megatron_zbpp.cli import benching, main, profiling
from megatron_zbpp.cli.arguments import load_devices, load_layers
from megatron_zbpp.ir import formats
from megatron_zbpp.mcore.settings import freeze_plan
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
    takes: tuple[str, ...]
    commands: list[str]


def printed(*words: str) -> str:
    """What a command writes into `-o`."""
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
        measured = json.dumps(STAGES), recorded('vpp-0.json.gz'), timers
        on_devices = ['partition layers.json --microbatches 4 --seconds 0.02 --devices']
        yield {
            'schedule': Reader(formats.load_plan, schedules, checked),
            'costs': Reader(StageCosts.read, costs, timed),
            'layers': Reader(load_layers, (LAYERS.to_json(), parted), layered),
            'devices': Reader(
                lambda path: load_devices(path, None), (NODES.to_json(), parted), on_devices
            ),
            'freezing': Reader(freeze_plan, (freezing,), []),
            'stages': Reader(
                lambda path: profiling._measured(f'Et|tL={path}'),
                (json.dumps(STAGES),),
                ['profile --stages Et|tL='],
            ),
            'times': Reader(
                lambda path: read_times([path], 'Et|tL'),
                measured,
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
def contents(draw: Any, takes: tuple[str, ...]) -> bytes:
    """Bytes of a file."""
    kind = draw(
        st.sampled_from(['changed', 'changed', 'cut', 'inserted', 'value', 'yaml', 'bytes'])
    )
    text = draw(st.sampled_from(takes))
    if kind == 'bytes':
        return draw(st.sampled_from(WHOLE) | st.binary(max_size=40))
    if kind == 'value':
        return json.dumps(draw(VALUES)).encode()
    if kind in ('changed', 'yaml') and text.startswith('{'):
        original = json.loads(text)
        path = draw(st.sampled_from([*places(original)]))
        how = draw(st.sampled_from(['replaced', 'gone', 'added']))
        document = changed(original, path, how, draw(ODD | VALUES))
        if kind == 'changed' or len(text) > 10_000:
            return json.dumps(document).encode()
        return yaml.safe_dump(document).encode('utf-8', 'surrogatepass')
    at = draw(st.integers(0, len(text)))
    end = '' if kind == 'cut' else draw(st.sampled_from(MARKS)) + text[at:]
    return (text[:at] + end).encode()


def require_line(told: str, path: str) -> None:
    assert path in told and told.isprintable(), told


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
        ('any.yaml', 'F: !!int ""'), ('any.yaml', '&a [*a]'),
    ],
    ids=['lists', 'objects', 'less deep', 'YAML', 'aliases', 'tag', 'of itself'],
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
