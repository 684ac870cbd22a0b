"""Commands of the tests: what they print and, past their time, their end with all they started.

By an interpreter of their own, and as forks of one that has imported torch.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import commands
import compositions
import example
import forked
import models
import nvidia
import psutil
import pytest
from commands import run
from grids import beside_another
from paths import ROOT
from ranks import RankError

pytest_plugins = ['pytester']
both = pytest.mark.parametrize('run', [commands.run, forked.run], ids=['new', 'forked'])

# a child in a session of its own, as torchrun's ranks are
PARENT = """
import subprocess, sys, time
sleep = [sys.executable, '-c', 'import time; time.sleep(100)']
child = subprocess.Popen(sleep, start_new_session=True)
print(f'child {child.pid}.', flush=True)
time.sleep(100)
"""


@both
def test_ended(run) -> None:
    code = "import os, sys; print(os.environ['WHO']); print('no', file=sys.stderr); sys.exit(3)"
    done = run([sys.executable, '-c', code], env={'WHO': 'us'})
    assert (done.returncode, done.stdout, done.stderr) == (3, 'us\n', 'no\n')


@both
@pytest.mark.parametrize(
    ('code', 'status', 'said'),
    [
        ("raise SystemExit('why')", 1, 'why\n'),
        ('1 / 0', 1, 'ZeroDivisionError: division by zero\n'),
        ('import os; os.kill(os.getpid(), 9)', -9, ''),
        ('import os; os.kill(os.getpid(), 15)', -15, ''),
        ('import os; os.kill(os.getpid(), 2); input()', -2, 'KeyboardInterrupt\n'),
    ],
)
def test_how_it_ended(run, code, status, said) -> None:
    done = run([sys.executable, '-c', code])
    assert done.returncode == status and done.stderr.endswith(said)


@both
def test_a_program_is_alone(run, tmp_path) -> None:
    """Its module is `__main__`, its folder is first on the path, after it ends nothing is left."""
    (tmp_path / 'beside.py').write_text('import atexit\natexit.register(print, "at the end")\n')
    code = 'import beside, sys\n\nclass A:\n    pass\n\n\n'
    code += 'print(sys.argv[1:], A.__module__, __file__, sys.modules["__main__"].A is A)\n'
    (tmp_path / 'program.py').write_text(code)
    done = run([sys.executable, tmp_path / 'program.py', 'a b'], cwd='/')
    said = f"['a b'] __main__ {tmp_path / 'program.py'} True\nat the end\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, '')
    (tmp_path / '__main__.py').write_text('import sys\nprint(*sys.argv[1:], __name__)\n')
    done = run([sys.executable, '-m', tmp_path.name, 'c'], cwd=tmp_path.parent)
    assert (done.stdout, done.stderr) == ('c __main__\n', '')


RANK = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group('gloo')
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), *sys.argv[1:], sep=' ', flush=True)
dist.barrier()  # torchrun ends the others with the first that fails
sys.exit(3 * dist.get_rank())
"""


def test_ranks_are_forked_too(tmp_path) -> None:
    """torchrun sees how each ends."""
    (tmp_path / 'rank.py').write_text(RANK)
    torchrun = ['torchrun', '--standalone', '--nproc-per-node', 2, tmp_path / 'rank.py', 'a']
    done = forked.run(torchrun)
    assert done.returncode == 1 and done.stdout == '2.0 a\n' * 2
    assert 'exitcode  : 3 ' in done.stderr
    text = f'torchrun --standalone --nproc-per-node 1 {tmp_path / "rank.py"} && zbpp list'
    done = forked.run(['bash', '-c', text])
    assert done.stdout.startswith('1.0\n1f1b ') and done.returncode == 0


@both
def test_late(run) -> None:
    with pytest.raises(AssertionError, match=r'not done after 10 s') as late:
        run([sys.executable, '-c', PARENT], timeout=10)
    (pid,) = re.findall(r'^child (\d+)\.$', str(late.value), re.M)
    assert not runs(int(pid))


def runs(pid: int) -> bool:
    """Whether it is there, and not just waiting for its new parent to notice its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- Legs of CI: one runs each case, one a case of each test.


FILE = 'tests/megatron/test_post_validation.py'


def collected(*arguments: str) -> set[str]:
    command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', FILE, *arguments]
    done = forked.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]
    return {line for line in done.stdout.splitlines() if '::' in line}


CASES = """
import pytest

two = pytest.mark.parametrize('name', ['first', 'second'])
skipped = pytest.param('skipped', marks=pytest.mark.skipif(True, reason='of another release'))

@two
def test_a(name): ...

@pytest.mark.parametrize('name', [skipped, 'runs', 'runs too'])
def test_b(name): ...

def test_c(): ...

@pytest.mark.each_release
@two
def test_differs(name): ...

@pytest.mark.one_release
@two
def test_takes_long(name): ...
"""


def test_one_case_of_each_test(pytester):
    """The first that runs here: it is not lost where a mark skips those before it."""
    items = pytester.getitems(CASES)
    left_out = beside_another(items)
    kept = [item.name.removeprefix('test_') for item in items if item not in left_out]
    assert kept == ['a[first]', 'b[skipped]', 'b[runs]', 'c', 'differs[first]', 'differs[second]']


def test_one_case_is_asked_for():
    """Where tests are collected: each function that runs here has one case."""
    whole, one = collected(), collected('--one-case')
    names = [name.partition('[')[0] for name in one]
    assert one < whole and sorted(set(names)) == sorted(names)
    assert {*names} == {name.partition('[')[0] for name in whole}


def test_flags_of_all_runs(monkeypatch, tmp_path):
    """Of NVIDIA's loop and of the example; those of Megatron's own schedules stay as they are."""
    words = []

    def stopped(function, argv, *rest):
        words.append(argv)
        raise InterruptedError

    monkeypatch.setenv('MEGATRON_ZBPP_STOCK', 'off')
    monkeypatch.setattr(nvidia, 'ALSO', ['--pipeline-prewarm'])
    ranks = SimpleNamespace(run=stopped)
    for flags in ([], ['--pipeline-schedule', 'zb-v'], ['--pipeline-schedule-file', 'plan.json']):
        with pytest.raises(InterruptedError):
            nvidia.run(ranks, *flags)
    for schedule in ('megatron', 'zb-v'):
        with pytest.raises(InterruptedError):
            example.run(ranks, '--pipeline-schedule', schedule)
        words.append(models.Job().argv(schedule, False, tmp_path))
    ours = [False, True, True, False, False, True, True]
    assert ['--pipeline-prewarm' in argv for argv in words] == ours


# ---- What is drawn for random trainings, and what is promised of it.


DRAWN = [compositions.draw(seed) for seed in range(1500)]


def test_everything_is_drawn():
    assert [compositions.draw(seed) for seed in range(50)] == DRAWN[:50]
    # each schedule, model, technique and event, and each pair of techniques
    assert {each.schedule for each in DRAWN} == {*compositions.SCHEDULES}
    assert {each.words[1] for each in DRAWN} == {*compositions.MODELS}
    assert {each.event for each in DRAWN} == {*compositions.EVENTS}
    names = [*compositions.TECHNIQUES]
    seen = {(one, other) for each in DRAWN for one in each.techniques for other in each.techniques}
    missing = {(one, other) for one in names for other in names} - seen
    assert missing == {
        ('split_vocabulary', 'split_embedding'),
        ('split_embedding', 'split_vocabulary'),
    }


def test_the_docs_say_what_is_promised():
    promised = {each for drawn in DRAWN for each in compositions.promises(drawn)}
    assert {each.how for each in promised} == {
        compositions.BITS,
        compositions.CLOSE,
        compositions.REFUSED,
        compositions.ENDS,
    }
    for promise in promised:
        page = ' '.join((ROOT / 'docs' / promise.page).read_text().split())
        assert promise.quote in page, promise
    assert compositions.pairs()['offload', 'evict'] == 'to the bit'
    assert compositions.pairs()['overlap', 'offload'].startswith('refused: Megatron frees')
    assert {row for row, _ in compositions.pairs()} >= {'sliced', 'split_vocabulary'}


TRACEBACK = """rank 0: Traceback (most recent call last):
  File "/site-packages/{file}", line 1, in step
    fail()
{error}
rank 1: no answer
"""


@pytest.mark.parametrize(
    ('file', 'error', 'explained'),
    [
        ('megatron_zbpp/mcore/a.py', 'NotImplementedError: x = 1: a reason: a cure', True),
        ('megatron_zbpp/mcore/a.py', 'KeyError: (1, 0, 0)', False),
        ('megatron_zbpp/mcore/a.py', 'AssertionError', False),
        ('torch/autograd.py', 'RuntimeError: sizes: 1, 2', False),
    ],
)
def test_errors_without_a_reason_are_faults(file, error, explained):
    found = compositions.Failure.of(RankError(TRACEBACK.format(file=file, error=error)))
    assert found == (error, explained)
    assert compositions.Outcome('unexplained', error).is_fault


def test_the_script_lists_and_refuses():
    command = [sys.executable, 'scripts/fuzz_training.py', '--seed', '7', '--count']
    lines = run([*command, '2', '--list'], cwd=ROOT).stdout.splitlines()
    assert [line.partition(':')[0] for line in lines] == ['7', '8']
    assert all(str(compositions.draw(7 + k)) in line for k, line in enumerate(lines))
    refused = run([*command, '0'], cwd=ROOT)
    assert refused.returncode == 2
    assert '--count 0 is wrong because nothing would run' in refused.stderr
