"""A rank dies, stalls or errs in each phase of its schedule: all others say where they stand."""

import json
import os
import re
import signal
import sys
import time

import psutil
import pytest
from commands import run
from paths import ROOT, SUPPORT

from megatron_zbpp import Pass, build
from megatron_zbpp.runtime.guard.watchdog import EXIT_CODE, Watchdog

TIMEOUT = 5.0
MISHAPS = ['SIGKILL', 'SIGSTOP', 'exception', 'wrong shape', 'stuck']
# phase: the pass of rank 1 in which it happens; of ranks 0 and 2, the pass that each waits to run
# for a gradient and an output of a microbatch of stage 1
PHASES = {
    'warm-up': ('1F1', ('0B0', 0), ('2F1', 1)),
    'steady': ('1B2', ('0B2', 2), ('2F4', 4)),
    'cool-down': ('1B5', ('0B5', 5), (None, None)),
}


def case(mishap, where, ranks=3, schedule='zb-h1', microbatches=6, **more):
    sizes = {'ranks': ranks, 'schedule': schedule, 'microbatches': microbatches}
    return {'mishap': mishap, 'pass': where, 'timeout': TIMEOUT, **sizes, **more}


CASES = {
    **{
        f'{mishap} in {phase}': case(mishap, where)
        for mishap in MISHAPS
        for phase, (where, *_) in PHASES.items()
    },
    'wrong type': case('wrong type', '1F1'),
    'far away': case('SIGSTOP', '0F3', 4, 'zb-v'),
    'first killed': case('SIGKILL', '0F3', 4, 'zb-v'),
    'blocking, one killed': case('SIGKILL', '1B2', blocks=True),
    'blocking, first killed': case('SIGKILL', '0F3', 4, 'zb-v', blocks=True),
    # rank 3 keeps activations for rank 0
    **{
        f'partner, {mishap} at {what}': case(mishap, p, 4, 'bpipe', 8)
        for mishap in ('SIGKILL', 'SIGSTOP')
        for what, p in (('load', '3F1'), ('eviction', '3F3'))
    },
    'slow pass': case('slow', '1F1'),
    'long pause': case('slow', '1F1', pause=1.5 * TIMEOUT),
}


@pytest.fixture(scope='module')
def ended(tmp_path_factory):
    """Exit code, seconds since the latest pass and standard error, by case and rank."""
    cases = tmp_path_factory.mktemp('cases') / 'cases.json'
    cases.write_text(json.dumps(list(CASES.values())))
    program = SUPPORT / 'mishaps.py'
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    # torch's stores ask for the name of whoever connects, and stand while no server answers
    env = {'PYTHONPATH': path, 'RES_OPTIONS': 'timeout:1 attempts:1'}
    done = run([sys.executable, program, cases], env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


def report(rank):
    """The lines of the one report of a rank; fails where there is none, or are two."""
    blocks = rank['said'].split('pipeline watchdog: ')[1:]
    (block,) = (each for each in blocks if 'ended after its failure' not in each)
    title, *lines = block.splitlines()
    fields = {}
    for line in lines:
        name, _, value = line.strip().partition(': ')
        fields.setdefault(name, value)
    return title, fields


def blamed(rank, culprit):
    """The report of a rank that has ended by itself, and blames that one."""
    assert rank['code'] not in (None, 0), rank
    title, fields = report(rank)
    assert re.match(r'global rank (\d+), which ', fields['culprit'])[1] == str(culprit), rank
    return title, fields


@pytest.mark.parametrize('phase', PHASES)
@pytest.mark.parametrize('mishap', MISHAPS)
def test_others_report_and_exit(ended, mishap, phase):
    schedule = build('zb-h1', 3, 6)
    ranks = ended[f'{mishap} in {phase}']
    for other, (now, microbatch) in zip((0, 2), PHASES[phase][1:], strict=True):
        what = f'{"output" if other else "gradient"} of stage 1 microbatch {microbatch}'
        awaited = f'{what} from pipeline rank 1 (global rank 1)'
        awaited = awaited if now else 'the other ranks of the pipeline to end their passes'
        title, fields = blamed(ranks[other], 1)
        assert title.startswith(f'global rank {other} on ')
        order = schedule.passes[other]
        at = len(order) if now is None else order.index(Pass.parse(now))
        assert fields['now'] == (f'{order[at].words} ({now})' if now else 'all 18 passes done')
        assert fields['waits for'] == awaited
        assert fields['last passes'] == ' '.join(map(str, order[:at][-10:]))
    if mishap in ('SIGSTOP', 'stuck'):  # nothing tells the others but time
        first = [rank for rank in ranks if rank['code'] == EXIT_CODE]
        assert first and all(rank['still'] > TIMEOUT for rank in first)


@pytest.mark.parametrize('phase', PHASES)
@pytest.mark.parametrize('mishap', ['exception', 'wrong shape', 'stuck'])
def test_the_rank_itself_says_where(ended, mishap, phase):
    rank = ended[f'{mishap} in {phase}'][1]
    p = Pass.parse(PHASES[phase][0])
    title, fields = report(rank)
    assert rank['code'] not in (None, 0)
    if mishap != 'wrong shape':
        assert fields['now'] == f'{p.words} ({p})'
        stuck = f'no step forward for {TIMEOUT:g} s'
        assert title.endswith(stuck if mishap == 'stuck' else 'RuntimeError: out of luck')
        assert mishap == 'exception' or fields['in'].startswith('befall (')
    else:
        assert fields['now'] == f'right after {p.words} ({p})'
        taker = Pass('B', 0, p.microbatch) if p.kind == 'B' else Pass('F', 2, p.microbatch)
        made = f'{p.words} made (2, 6) of torch.float32, but {taker.words} takes (3, 6)'
        assert made in title


def test_wrong_type_is_refused_before_it_is_sent(ended):
    title, _ = report(ended['wrong type'][1])
    assert 'F stage 1 microbatch 1 made (3, 6) of torch.float64' in title
    assert 'takes (3, 6) of torch.float32' in title


@pytest.mark.parametrize(
    ('case', 'culprit', 'code'),
    [
        ('far away', 0, None),  # nobody waits for it itself, three ranks away; it keeps the store
        ('first killed', 0, -9),  # with it goes the store that it keeps
        *((f'partner, SIGKILL at {what}', 3, -9) for what in ('load', 'eviction')),
        *((f'partner, SIGSTOP at {what}', 3, None) for what in ('load', 'eviction')),
        ('blocking, one killed', 1, -9),  # nobody hears of it
        ('blocking, first killed', 0, -9),
    ],
)
def test_who_is_gone_is_named(ended, case, culprit, code):
    """By all others, far away or amid a transfer; on a backend that blocks, after their time."""
    ranks = ended[case]
    assert ranks[culprit]['code'] == code
    reports = {other: blamed(rank, culprit) for other, rank in enumerate(ranks) if other != culprit}
    for other, (title, fields) in reports.items():
        assert case != 'far away' or 'from pipeline rank' in fields['waits for']
        if case.startswith('blocking'):
            assert title.endswith(f'no step forward for {TIMEOUT:g} s')
            assert ranks[other]['code'] == EXIT_CODE and ranks[other]['still'] > TIMEOUT
    if case.endswith('eviction'):
        taken = 'pipeline rank 3 (global rank 3) to take activations of stage 0 microbatch 5'
        assert reports[0][1]['waits for'] == taken


@pytest.mark.parametrize('case', ['slow pass', 'long pause'])
def test_no_false_alarm(ended, case):
    """Half of the time in one pass, or longer than the time between two iterations."""
    assert [rank['code'] for rank in ended[case]] == [0, 0, 0], ended[case]
    assert not any('pipeline watchdog' in rank['said'] for rank in ended[case])


ALONE = """
import atexit, sys, time
import torch.distributed as dist
from megatron_zbpp.runtime.guard.watchdog import Watchdog

dist.init_process_group('gloo', f'file://{sys.argv[1]}', rank=0, world_size=1)
"""
AT_ITS_END = """
atexit.register(time.sleep, 500)
with Watchdog(2).collective('some barrier'):
    raise ValueError('what failed')
"""


def test_hanging_while_python_ends(tmp_path):
    """Where 3.12 and later begin no thread."""
    command = [sys.executable, '-c', ALONE + AT_ITS_END, tmp_path / 'met']
    done = run(command, env={'PYTHONPATH': str(ROOT)})
    assert done.returncode == EXIT_CODE, done.stderr
    assert 'ended after its failure' in done.stderr


PAUSING = """
def save():
    time.sleep(100 if watchdog._pause_timeout else 4)

watchdog = Watchdog(3, float(sys.argv[2]))
with watchdog.collective('some step'):
    pass
save()
"""


@pytest.mark.parametrize('limit', [2, 0])
def test_pause(tmp_path, limit):
    """What comes after a step may last longer than a step, and not for ever."""
    command = [sys.executable, '-c', ALONE + PAUSING, tmp_path / 'met', limit]
    done = run(command, env={'PYTHONPATH': str(ROOT)})
    if not limit:
        assert (done.returncode, done.stderr) == (0, '')
        return
    assert done.returncode == EXIT_CODE
    title, fields = report({'said': done.stderr})
    assert title.endswith('no step forward for 2 s')
    assert fields['now'].startswith('between passes, in save (')
    assert fields['waits for'] == 'no collective call of torch.distributed'


def test_pauses_are_long():
    assert Watchdog(1)._pause_timeout == 600
    assert Watchdog(300)._pause_timeout == 3000


def test_negative_timeout_is_refused():
    with pytest.raises(ValueError, match='-1 is negative'):
        Watchdog(-1)
    with pytest.raises(ValueError, match='-1 is negative'):
        Watchdog(1, -1)


# ---- Children of a process that is killed.


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
    done = run(command, env={'PYTHONPATH': str(ROOT)})
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
