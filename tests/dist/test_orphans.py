"""A forked or spawned child ends with its parent, though that is killed."""

import signal
import sys
import time

import commands
import psutil
import pytest
from paths import ROOT

PROGRAM = """
import multiprocessing, os, signal, sys, threading, time
from multiprocessing import resource_tracker
from megatron_zbpp.runtime.guard.watchdog import end_with_parent

def say(*pids):  # in one piece: a child may write into the same pipe
    os.write(1, f"{' '.join(map(str, pids))}\\n".encode())

def fork():
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    say(child)

def spawn():  # as Megatron does for the queue of its writers
    global manager
    manager = multiprocessing.get_context('spawn').Manager()
    say(manager._process.pid, resource_tracker._resource_tracker._pid)

how, bound, place = sys.argv[1:]
start = {'fork': fork, 'spawn': spawn}[how]
if bound == 'bound':
    end_with_parent()
if place == 'thread':
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(0.5)  # the thread has ended: its child has not
else:
    start()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='by a call of Linux')
@pytest.mark.parametrize(
    ('bound', 'place', 'lives'),
    [('bound', 'main', False), ('bound', 'thread', True), ('as it was', 'main', True)],
)
@pytest.mark.parametrize('how', ['fork', 'spawn'])
def test_children_of_a_killed_process(how, bound, place, lives):
    command = [sys.executable, '-c', PROGRAM, how, bound, place]
    done = commands.run(command, env={'PYTHONPATH': str(ROOT)})
    assert done.returncode == -signal.SIGKILL, done.stderr
    children = [int(pid) for pid in done.stdout.split()]
    assert len(children) == (2 if how == 'spawn' else 1)
    try:
        deadline = time.monotonic() + (1 if lives else 60)
        while any(map(_runs, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [*map(_runs, children)] == [lives] * len(children)
    finally:
        for child in filter(_runs, children):
            psutil.Process(child).kill()


def _runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
