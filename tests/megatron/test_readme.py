"""Every command in the README runs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from commands import run
from nvidia import COMMON, SCRIPT, needs_training
from paths import ROOT

BLOCKS = re.findall(r'```bash\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)
COMMANDS = [
    line.split(' #')[0].strip()
    for block in BLOCKS
    for line in block.replace('\\\n', ' ').splitlines()
    if line.strip()
]
# run by continuous integration and by test_quickstart
SCRIPTS = {'./scripts/quickstart.sh', './scripts/test.sh'}


def test_the_scripts_are_there():
    assert {c for c in COMMANDS if c.startswith('./scripts')} == SCRIPTS
    assert all(os.access(ROOT / script, os.X_OK) for script in SCRIPTS)


def torchrun(*arguments):
    """What `torchrun` with these arguments prints."""
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    done = run([*launch, *arguments], cwd=ROOT, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_command(data):
    (command,) = [c for c in COMMANDS if 'examples/gpt/pretrain_gpt.py' in c]
    _, *arguments = shlex.split(command)
    printed = torchrun(*arguments, '--train-iters', '2', '--data-path', str(data))
    assert re.search(r'iteration +2/ +2 \|.*lm loss: [\d.E+-]+ \| grad norm', printed)


@needs_training
def test_launch_command():
    """On two ranks of the CPU, with a script and arguments where the README has dots."""
    (command,) = [c for c in COMMANDS if 'megatron_zbpp.launch' in c]
    command = command.replace('/path/to/Megatron-LM/pretrain_gpt.py', f'--cpu {SCRIPT}')
    for there, here in (('--nproc-per-node 8', '--nproc-per-node 2'), ('-size 8', '-size 2')):
        assert there in command
        command = command.replace(there, here)
    filling = [*COMMON, '--train-iters', '2', '--global-batch-size', '4']
    _, *arguments = shlex.split(command.replace('...', shlex.join(filling)))
    assert re.search(r'iteration +2/ +2 \|.*lm loss: [\d.E+-]+ \|', torchrun(*arguments))


@pytest.mark.parametrize('command', [c for c in COMMANDS if c.startswith('python scripts/')])
def test_benchmark_command(command, tmp_path):
    """Each as it is, but smaller, and without pictures in the checkout."""
    _, script, *arguments = shlex.split(command)
    small = {
        'benchmark_step.py': ['--parameters', '0.1'],
        'benchmark_overhead.py': ['--repeats', '2'],
        'benchmark_training.py': '--hidden-size 64 --seq-length 8 --rounds 1'.split(),
        'benchmark_pipelines.py': ['--pp', '2', '--microbatches', '3', '--times-ms', '1,1,1'],
    }[Path(script).name]
    if script.endswith('pipelines.py'):
        small += ['--rounds', '1', '--schedules', 'zb-v']
        small += ['--schedules', 'zb-v,zb-v+post-validation'] * ('--optimizer' in arguments)
        arguments.remove('--realtime')  # not everybody may
    given = [Path(a).name if a.endswith(('.png', '.json')) else a for a in arguments]
    done = run([sys.executable, ROOT / script, *given, *small], cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """The commands of one block use each other's files."""
    made = tmp_path_factory.mktemp('readme')
    (made / 'docs' / 'pictures').mkdir(parents=True)
    return made


@pytest.mark.parametrize('command', [c for c in COMMANDS if 'zbpp ' in c])
def test_zbpp_command(command, folder):
    program, *arguments = shlex.split(command)
    assert program == '.venv/bin/zbpp'
    zbpp = Path(sys.executable).with_name('zbpp')
    done = run([zbpp, *arguments], cwd=folder, env={'XDG_CACHE_HOME': str(folder)}, timeout=100)
    assert done.returncode == 0, done.stderr
