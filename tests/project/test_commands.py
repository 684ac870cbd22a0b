"""Commands of the tests: what they print and, past their time, their end with all they started.

By an interpreter of their own, and as forks of one that has imported torch.
"""

from __future__ import annotations

import re
import sys

import commands
import forked
import psutil
import pytest

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
