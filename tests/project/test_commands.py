"""Commands of the tests: what they print and, past their time, their end with all they started."""

from __future__ import annotations

import re
import sys
import time

import psutil
import pytest
from commands import run

# a child in a session of its own, as torchrun's ranks are
PARENT = """
import subprocess, sys, time
sleep = [sys.executable, '-c', 'import time; time.sleep(100)']
child = subprocess.Popen(sleep, start_new_session=True)
print(f'child {child.pid}.', flush=True)
time.sleep(100)
"""


def test_ended() -> None:
    code = "import os, sys; print(os.environ['WHO']); print('no', file=sys.stderr); sys.exit(3)"
    done = run([sys.executable, '-c', code], env={'WHO': 'us'})
    assert (done.returncode, done.stdout, done.stderr) == (3, 'us\n', 'no\n')


def test_late() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r'not done after 3 s') as late:
        run([sys.executable, '-c', PARENT], timeout=3)
    assert time.monotonic() - start < 60
    (pid,) = re.findall(r'^child (\d+)\.$', str(late.value), re.M)
    assert not runs(int(pid))


def runs(pid: int) -> bool:
    """Whether it is there, and not just waiting for its new parent to notice its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
