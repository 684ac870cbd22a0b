"""The examples of `--help` run, with each option that they show: alone, all together, and none."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nsight_report import report
from paths import ROOT

from megatron_zbpp.cli import main
from megatron_zbpp.cli.parser import _EXAMPLES

RECORDED = ROOT / 'tests' / 'unit' / 'partitioning' / 'recorded'
LINES = [re.split(r' {3,}', line)[0] for line in _EXAMPLES.split('\n') if line]
# what an example cannot do without: by command, or of any
NEEDED = {
    '': {'--schedule', '--file', '--pp', '--microbatches'},
    'convert': {'--to', '-o'},
    'page': {'-o'},
    'profile': {'--model', '--num-layers', '--hidden', '--heads', '--vocab', '--seq', '--tflops'}
    | {'--stages'},
}
# the same in less time
SMALL = {
    '--pp': '4', '--microbatches': '8', '--seconds': '1', '--frontier': '3,4,5', '--most': '.5',
    '--latencies': '0,1',
}  # fmt: skip
SEARCHES = ('plan', 'partition')
FILES = (
    'profile --model gpt --num-layers 24 --hidden 64 --heads 2 --vocab 128 --seq 32 --tflops 1 '
    '-o layers.json',
    'convert --schedule 1f1b --pp 4 --microbatches 8 --to json -o plan.json',
)


def divided(line: str) -> tuple[list[str], list[list[str]]]:
    """What an example cannot do without, and its options, each with its value; both in words."""
    needed: list[str] = []
    options: list[list[str]] = []
    _, name, *words = shlex.split(line)
    while words:
        own = [words.pop(0)]
        if own[0].startswith('-') and words and not words[0].startswith('-'):
            own.append(SMALL.get(own[0], words.pop(0)))
        if own[0].startswith('-') and own[0] not in NEEDED[''] | NEEDED.get(name, set()):
            options.append(own)
        else:
            needed += own
    return [name, *needed], options


def cases() -> list[Any]:
    """Each once: words of a command, and the options of its example."""
    found: dict[str, Any] = {}
    for line in LINES:
        if line.startswith(('zbpp doctor', 'zbpp bench', 'zbpp advise')):
            continue
        needed, options = divided(line)
        for chosen in ([], *([each] for each in options), options):
            words = [*needed, *(word for own in chosen for word in own)]
            if needed[0] == 'partition' and not {'--devices', '--pp'} & set(words):
                words += ['--pp', '4']  # one of the two
            if needed[0] == 'page' and '--pp' not in words:
                words += ['--pp', '4', '--microbatches', '8']  # of all sizes it takes long
            if needed[0] in SEARCHES and '--seconds' not in words:
                words += ['--seconds', '1']
            found.setdefault(' '.join(words), pytest.param(words, options, id=' '.join(words)))
    return list(found.values())


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('examples')
    for line in FILES:
        done = run(line.split(), folder)
        assert done.returncode == 0, done.stderr
    (folder / 'trace').mkdir()
    stages = '{"layout": "Ett|ttL", "F": [3, 2], "B": [3, 2], "W": [3, 2]}'
    (folder / 'trace' / 'stages.json').write_text(stages)
    shutil.copy(RECORDED / 'timers-all.log', folder / 'job.log')
    for rank in (0, 1):
        shutil.copy(RECORDED / f'stock-{rank}.json.gz', folder / f'rank{rank}.json.gz')
    report(folder / 'report.sqlite')
    (folder / 'times.json').write_text('{"F": [3, 2, 3], "B": [3, 2, 3], "W": [3, 2, 3]}')
    (folder / 'devices.json').write_text('{"devices": [{}, {}, {}, {"factor": {"F": 2}}]}')
    return folder


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, '-m', 'megatron_zbpp.cli', *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(('words', 'options'), cases())
def test_runs(words, options, folder, tmp_path, monkeypatch, capsys):
    """Or is refused in one line; it runs with the options of the example that the line names."""
    # a plan.json of its own: examples write one, too, and in any order
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / 'examples'))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    status, said = main(words), capsys.readouterr()
    while status:
        assert (status, said.err.count('\n')) == (2, 1), said.err
        cure = [own for own in options if own[0] in said.err and own[0] not in words]
        assert cure, said.err
        words = [*words, *cure[0]]
        status, said = main(words), capsys.readouterr()
    assert said.out


def test_all_are_shown(folder):
    from megatron_zbpp.cli.parser import _COMMANDS

    assert {line.split()[1] for line in LINES} == {name for name, *_ in _COMMANDS}
    assert len(cases()) > 40
    (line,) = (line for line in LINES if line.startswith('zbpp doctor'))
    sizes = '--num-layers 32 --pipeline-model-parallel-size 8 --micro-batch-size 1'
    words = line.replace('...', f'{sizes} --global-batch-size 24').split()[1:]
    (folder / 'pretrain_gpt.py').touch()
    done = run(words, folder)
    assert done.returncode == 0 and 'schedule: zb-v' in done.stdout, done.stderr + done.stdout
