"""A forked child ends with its parent, though that is killed."""

from __future__ import annotations

import signal
import sys
import time

import commands
import psutil
import pytest
from paths import ROOT

PROGRAM = """
import os, signal, sys, threading, time
from megatron_zbpp.runtime.guard.orphans import end_with_parent

def fork():
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)

if sys.argv[1] != 'as it was':
    end_with_parent()
if sys.argv[1] == 'of a thread':
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    time.sleep(0.5)  # the thread has ended: its child has not
else:
    fork()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='by a call of Linux')
@pytest.mark.parametrize(
    ('how', 'lives'), [('ending with it', False), ('of a thread', True), ('as it was', True)]
)
def test_a_child_of_a_killed_process(how, lives, tmp_path):
    said = tmp_path / 'said'
    with said.open('w') as out:
        command = [sys.executable, '-c', PROGRAM, how]
        done = commands.run(command, env={'PYTHONPATH': str(ROOT)}, stdout=out, stderr=out)
    assert done.returncode == -signal.SIGKILL
    child = (
        psutil.Process(int(said.read_text())) if psutil.pid_exists(int(said.read_text())) else None
    )
    try:
        deadline = time.monotonic() + (1 if lives else 10)
        while child and _runs(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert bool(child and _runs(child)) == lives
    finally:
        if child and _runs(child):
            child.kill()


def _runs(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
