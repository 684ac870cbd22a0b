"""Every command of the README and of the pages in docs/ runs."""

import ast
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import commands
import pages
import pytest
import walks
from forked import run
from nvidia import COMMON, SCRIPT, needs_training
from paths import ROOT
from test_first_hour import BY_README, WALKS

pytestmark = pytest.mark.one_release

COMMANDS = pages.commands()
RUNNERS = json.loads(Path(__file__).with_name('run_elsewhere.json').read_text())
# command: the file that runs it
ELSEWHERE = {command: runner for runner, found in RUNNERS.items() for command in found}
WALK = {  # by tests/megatron/test_first_hour.py, with those between
    c.line for c in COMMANDS if c.page.stem == 'unbalanced' and 'megatron_zbpp.launch' in c.line
}
REFERENCE = {  # by tests/megatron/test_asynchronous.py
    c.line for c in COMMANDS if c.page.stem == 'asynchronous' and c.line.startswith('torchrun')
}
ROLLBACK = {  # by tests/megatron/test_first_hour.py, one after the other
    c.line for c in COMMANDS if c.page.stem == 'troubleshooting' and c.line.startswith('torchrun')
}
RUN_THERE = WALK | ROLLBACK
LAUNCH = [c.line for c in COMMANDS if 'megatron_zbpp.launch' in c.line and c.line not in RUN_THERE]
BENCH = [c.line for c in COMMANDS if c.line.startswith('zbpp bench')]
INSTALL = [c.line for c in COMMANDS if c.line.startswith('pip install')]
BENCHMARKS = [
    c.line
    for c in COMMANDS
    if c.line.startswith('python scripts/benchmark') and c.line not in ELSEWHERE
]
APART = {*ELSEWHERE, *LAUNCH, *BENCH, *RUN_THERE, *REFERENCE, *INSTALL, *BENCHMARKS}
WALKED = {  # by tests/megatron/test_first_hour.py, which looks at what each prints
    (page, line)
    for name, rows in WALKS.items()
    for page in [pages.README if name == 'README' else ROOT / 'docs' / f'{name}.md']
    for line, (_, *wanted) in zip(pages.lines(page), rows, strict=True)
    if wanted != [BY_README]
}
TOGETHER = {  # of each page, in one folder, as they use each other's files
    page: lines
    for page in pages.PAGES
    if (lines := [c.line for c in COMMANDS if c.page == page and c.line not in APART])
    and (lines := [line for line in lines if (page, line) not in WALKED])
}


def test_every_command_is_run():
    for command, runner in ELSEWHERE.items():
        script = re.search(r'scripts/(\w+\.\w+)', command)[1]
        assert script.removesuffix('.py') in (ROOT / runner).read_text(), command
        assert os.access(ROOT / 'scripts' / script, os.X_OK) or script.endswith('.py')
    known = ('zbpp ', 'python ', 'torchrun ', 'export ')
    assert all(line.startswith(known) for lines in TOGETHER.values() for line in lines)
    assert {*ELSEWHERE} < {c.line for c in COMMANDS}
    assert len(COMMANDS) > 30 and len(LAUNCH) > 1


@needs_training
@pytest.mark.parametrize('command', LAUNCH)
def test_launch_command(command):
    """On two ranks of the CPU, with a script and arguments where the page has dots. README's and
    getting started's is the same line, and runs in fresh interpreters; what it says is read, too:
    at the start, in each log line, and at the end."""
    plain = command in pages.lines(pages.README)
    assert plain == (command in pages.lines(ROOT / 'docs' / 'getting-started.md'))
    command = command.replace('/path/to/Megatron-LM/pretrain_gpt.py', f'--cpu {SCRIPT}')
    for there, here in (('--nproc-per-node 8', '--nproc-per-node 2'), ('-size 8', '-size 2')):
        assert there in command
        command = command.replace(there, here)
    filling = [*COMMON, '--train-iters', '3', '--global-batch-size', '4']
    _, *arguments = shlex.split(command.replace('...', shlex.join(filling)))
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', *arguments]
    done = (commands.run if plain else run)(launch, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    assert re.search(r'iteration +3/ +3 \|.*lm loss: [\d.E+-]+ \|', done.stdout)
    if not plain:
        return
    said = done.stdout + done.stderr
    start = re.findall(r'^megatron_zbpp: (?!training ends)(.*)', said, re.M)
    assert len(start) >= 5 and ': zb-v on 2 ranks x 2 chunks, 4 microbatches' in start[0], start
    assert any(each.startswith('losses from scratch are stock') for each in start), start
    log = r'iteration +\d/ +3 \|.* \| idle GPU time: \d+\.\d% \| pipeline bubble: \d+\.\d% \| live '
    assert len(re.findall(log, said)) == 3
    end = r'megatron_zbpp: training ends: .* of \d iterations; simulated .* time than 1f1b'
    assert len(re.findall(end, said)) == 1


@needs_training
@pytest.mark.parametrize('command', BENCH)
def test_bench_command(command, tmp_path):
    """On two ranks of the CPU: from one checkpoint, stock and a V print the same losses."""
    small = '--cpu --iterations 2 --rounds 1 --schedules zb-v --json'.split()
    at = command.replace('/path/to/Megatron-LM/pretrain_gpt.py', str(SCRIPT))
    at = at.replace('--nproc-per-node 8', '--standalone --nproc-per-node 2')
    at = at.replace('-size 8', '-size 2')
    filling = [*COMMON, '--train-iters', '2', '--global-batch-size', '4']
    before, _, line = at.replace('...', shlex.join(filling)).partition(' -- torchrun ')
    zbpp, name = before.split()
    done = run(
        [zbpp, name, *small, '--', 'torchrun', *shlex.split(line)], cwd=tmp_path, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert 'Transformer Engine' not in done.stderr, 'which Megatron notes when it is imported'
    stock, ours = json.loads(done.stdout)['schedules']
    assert ours['losses_equal'] and len(ours['losses']) == 2 == len(set(ours['losses']))
    assert 0 < ours['idle_all_ranks'] < 1 and stock['idle_all_ranks'] is None


@pytest.mark.parametrize('command', BENCHMARKS)
def test_benchmark_command(command, tmp_path):
    """Each as it is, but smaller, and without pictures in the checkout."""
    _, script, *arguments = shlex.split(command)
    small = {
        'benchmark_step.py': ['--parameters', '0.1'],
        'benchmark_watch.py': '--hidden 64 --layers 1 --tokens 8 --rounds 1'.split(),
        'benchmark_overhead.py': ['--repeats', '2'],
        'benchmark_training.py': '--hidden-size 64 --seq-length 8 --rounds 1'.split(),
        'benchmark_pipelines.py': ['--pp', '2', '--microbatches', '3', '--times-ms', '1,1,1'],
    }[Path(script).name]
    if '--realtime' in arguments:
        arguments.remove('--realtime')  # not everybody may
    if script.endswith('pipelines.py'):
        small += ['--rounds', '1', '--schedules', 'zb-v']
        small += ['--schedules', 'zb-v,zb-v+post-validation'] * ('--optimizer' in arguments)
    given = [Path(a).name if a.endswith(('.png', '.json')) else a for a in arguments]
    done = run([sys.executable, ROOT / script, *given, *small], cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    'page', TOGETHER, ids=lambda page: '-'.join(page.relative_to(ROOT).with_suffix('').parts)
)
def test_zbpp_commands(page, tmp_path, data):
    """What a page tells to type, one after the other, beside the files that it shows."""
    walks.prepare(page, tmp_path)
    lines = [walks.shorter(line, data) for line in TOGETHER[page]]
    env = {
        'XDG_CACHE_HOME': str(tmp_path / 'cache'),
        'PATH': f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}',
    }
    command = ['bash', '-exo', 'pipefail', '-c', '\n'.join(lines)]
    done = run(command, cwd=tmp_path, env=env, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    if any('examples/gpt' in line for line in lines):
        assert re.search(r'iteration +2/ +2 \|.*lm loss: [\d.E+-]+ \|', done.stdout)
    if 'train.py' in pages.files(page):
        losses = [float(loss) for loss in re.findall(r'iteration \d+: loss ([\d.]+)', done.stdout)]
        assert len(losses) == 20 and losses[-1] < 0.7 * losses[0]
        tree = ast.parse(pages.files(page)['train.py'])
        assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) == 25


@pytest.mark.parametrize(
    'code', sorted({b.text for b in pages.blocks() if b.language == 'python' and not b.title})
)
def test_snippet(tmp_path, code):
    """What has no file of its own."""
    if 'megatron.bridge' in code:
        pytest.skip('needs Megatron-Bridge: test_bridge.py runs such a program')
    enabled = 'assert plugin.enabled\nplugin.disable()' if 'plugin' in code else ''
    done = run([sys.executable, '-c', f'{code}\n{enabled}'], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope='module')
def checkout(tmp_path_factory) -> Path:
    """A copy of what is installed, so that nothing is built in ours."""
    copy = tmp_path_factory.mktemp('checkout')
    for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns('__pycache__')
    shutil.copytree(ROOT / 'megatron_zbpp', copy / 'megatron_zbpp', ignore=ignore)
    return copy


@pytest.mark.parametrize('command', [c for c in INSTALL if '--no-deps' in c])
def test_install_zbpp_command(command, checkout, tmp_path):
    """In a copy of the checkout; it then draws, on its own, in an interpreter of its own."""
    _, *arguments = shlex.split(command)
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check']
    options = ['--no-build-isolation', '--target', tmp_path]
    done = commands.run([*pip, *arguments, *options], timeout=200, cwd=checkout)
    assert done.returncode == 0, done.stderr
    code = 'from megatron_zbpp import cli; print(cli.__file__); cli.main(["list"])'
    said = commands.run(
        [sys.executable, '-c', code], cwd=tmp_path, env={'PYTHONPATH': str(tmp_path)}
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith(str(tmp_path)) and 'zb-v' in said.stdout
