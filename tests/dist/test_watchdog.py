"""A rank dies, stalls or errs in each phase of its schedule: all others say where they stand."""

import json
import os
import re
import sys

import pytest
from commands import run
from mishaps import SETTLED
from paths import ROOT, SUPPORT

from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.guard.watchdog import EXIT_CODE, Watchdog
from megatron_zbpp.schedules import build

TIMEOUT = 5.0
LAST_WORDS = 10.0  # seconds to ask who is to blame, and for a store that is gone, at most
SOUND = {'schedule': 'zb-h1', 'ranks': 3, 'microbatches': 6, 'timeout': TIMEOUT}
# torch's, where no name server answers
_NO_NAME = re.compile(r'.*socket\.cpp.* The hostname of the client socket cannot be retrieved.*\n')
MISHAPS = ['SIGKILL', 'SIGSTOP', 'exception', 'wrong shape', 'stuck']

# phase: the pass of rank 1 in which it happens, and by other rank: what it waits to run, and for
PHASES = {
    'warm-up': (
        '1F1',
        {
            0: ('0B0', 'gradient of stage 1 microbatch 0 from pipeline rank 1 (global rank 1)'),
            2: ('2F1', 'output of stage 1 microbatch 1 from pipeline rank 1 (global rank 1)'),
        },
    ),
    'steady': (
        '1B2',
        {
            0: ('0B2', 'gradient of stage 1 microbatch 2 from pipeline rank 1 (global rank 1)'),
            2: ('2F4', 'output of stage 1 microbatch 4 from pipeline rank 1 (global rank 1)'),
        },
    ),
    'cool-down': (
        '1B5',
        {
            0: ('0B5', 'gradient of stage 1 microbatch 5 from pipeline rank 1 (global rank 1)'),
            2: (None, 'the other ranks of the pipeline to end their passes'),
        },
    ),
}
CASES = {
    f'{mishap} in {phase}': SOUND | {'mishap': mishap, 'pass': PHASES[phase][0]}
    for mishap in MISHAPS
    for phase in PHASES
}
CASES |= {
    'wrong type': SOUND | {'mishap': 'wrong type', 'pass': '1F1'},
    'far away': SOUND | {'mishap': 'SIGSTOP', 'pass': '0F3', 'ranks': 4, 'schedule': 'zb-v'},
    'first killed': SOUND | {'mishap': 'SIGKILL', 'pass': '0F3', 'ranks': 4, 'schedule': 'zb-v'},
    'blocking, one killed': SOUND | {'mishap': 'SIGKILL', 'pass': '1B2', 'blocks': True},
    'blocking, first killed': SOUND
    | {'mishap': 'SIGKILL', 'pass': '0F3', 'ranks': 4, 'schedule': 'zb-v', 'blocks': True},
    # rank 3 keeps activations for rank 0
    **{
        f'partner, {mishap} at {what}': SOUND
        | {'mishap': mishap, 'pass': p, 'ranks': 4, 'schedule': 'bpipe', 'microbatches': 8}
        for mishap in ('SIGKILL', 'SIGSTOP')
        for what, p in (('load', '3F1'), ('eviction', '3F3'))
    },
    'slow pass': SOUND | {'mishap': 'slow', 'pass': '1F1'},
    'long pause': SOUND | {'mishap': 'slow', 'pass': '1F1', 'pause': 1.5 * TIMEOUT},
    'slice': SOUND | {'mishap': 'stuck', 'pass': '1B0', 'schedule': 'seq1f1b-zb'},
}


@pytest.fixture(scope='module')
def ended(tmp_path_factory):
    """Exit code, seconds since the mishap and standard error, by case and rank."""
    folder = tmp_path_factory.mktemp('cases')
    cases = folder / 'cases.json'
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
    blocks = rank['said'].split('pipeline watchdog: ')
    assert len(blocks) == 2, rank
    title, *lines = blocks[1].splitlines()
    fields = {}
    for line in lines:
        name, _, value = line.strip().partition(': ')
        fields.setdefault(name, value)
    return title, fields


def accused(fields):
    """The one global rank that a report blames."""
    found = re.match(r'global rank (\d+), which ', fields['culprit'])
    return int(found[1]) if found else fields['culprit']


@pytest.mark.parametrize('phase', PHASES)
@pytest.mark.parametrize('mishap', MISHAPS)
def test_others_report_and_exit(ended, mishap, phase):
    schedule = build('zb-h1', 3, 6)
    ranks = ended[f'{mishap} in {phase}']
    silent = mishap in ('SIGSTOP', 'stuck')  # nothing tells the others but time
    for other, (now, awaited) in PHASES[phase][1].items():
        rank = ranks[other]
        title, fields = report(rank)
        assert title.startswith(f'global rank {other} on ')
        order = schedule.passes[other]
        at = len(order) if now is None else order.index(Pass.parse(now))
        assert fields['now'] == (f'{order[at].words} ({now})' if now else 'all 18 passes done')
        assert fields['waits for'] == awaited
        assert fields['last passes'] == ' '.join(map(str, order[:at][-10:]))
        assert rank['code'] not in (None, 0)
        assert rank['seconds'] < TIMEOUT + LAST_WORDS
        assert not silent or rank['seconds'] > TIMEOUT - SETTLED - 0.5
        assert accused(fields) == 1
    if silent:
        assert EXIT_CODE in {rank['code'] for rank in ranks}, 'of who ends first'


@pytest.mark.parametrize('phase', PHASES)
@pytest.mark.parametrize('mishap', ['exception', 'wrong shape', 'stuck'])
def test_the_rank_itself_says_where(ended, mishap, phase):
    rank = ended[f'{mishap} in {phase}'][1]
    p = Pass.parse(PHASES[phase][0])
    title, fields = report(rank)
    assert rank['code'] not in (None, 0)
    if mishap == 'stuck':
        assert fields['now'] == f'{p.words} ({p})'
        assert title.endswith(f'no step forward for {TIMEOUT:g} s')
        assert fields['in'].startswith('befall (')
    elif mishap == 'exception':
        assert fields['now'] == f'{p.words} ({p})'
        assert title.endswith('RuntimeError: out of luck')
    else:
        assert fields['now'] == f'right after {p.words} ({p})'
        taker = Pass('B', 0, p.microbatch) if p.kind == 'B' else Pass('F', 2, p.microbatch)
        made = f'{p.words} made (2, 6) of torch.float32, but {taker.words} takes (3, 6)'
        assert made in title


def test_slices_are_named(ended):
    """The first of a microbatch, too, whose passes have no number of a slice in short."""
    ranks = ended['slice']
    where = 'of stage 1 microbatch 0 slice 0 from pipeline rank 1 (global rank 1)'
    _, fields = report(ranks[0])
    assert fields['now'] == 'B stage 0 microbatch 0 slice 0 (0B0)'
    assert fields['waits for'] == f'gradient {where}'
    assert accused(fields) == 1
    assert report(ranks[1])[1]['now'] == 'B stage 1 microbatch 0 slice 0 (1B0)'


def test_wrong_type_is_refused_before_it_is_sent(ended):
    title, _ = report(ended['wrong type'][1])
    assert 'F stage 1 microbatch 1 made (3, 6) of torch.float64' in title
    assert 'takes (3, 6) of torch.float32' in title


def test_far_from_the_stopped_rank(ended):
    """Three ranks away nobody waits for the stopped one itself."""
    ranks = ended['far away']
    assert ranks[0]['code'] is None
    for other in (1, 2, 3):
        _, fields = report(ranks[other])
        assert 'from pipeline rank' in fields['waits for']
        assert ranks[other]['code'] not in (None, 0)
        assert TIMEOUT - SETTLED - 0.5 < ranks[other]['seconds'] < TIMEOUT + LAST_WORDS
        assert accused(fields) == 0, 'though it keeps the store of the ranks'


def test_the_first_rank_is_killed(ended):
    """With it goes the store that it keeps."""
    ranks = ended['first killed']
    assert ranks[0]['code'] == -9
    for other in (1, 2, 3):
        _, fields = report(ranks[other])
        assert accused(fields) == 0, ranks[other]
        assert ranks[other]['seconds'] < LAST_WORDS


@pytest.mark.parametrize('what', ['load', 'eviction'])
@pytest.mark.parametrize('mishap', ['SIGKILL', 'SIGSTOP'])
def test_a_partner_is_gone_amid_a_transfer(ended, mishap, what):
    """All ranks end and name it; who waits for it to take activations says so."""
    ranks = ended[f'partner, {mishap} at {what}']
    awaited = {}
    for other in (0, 1, 2):
        _, fields = report(ranks[other])
        assert accused(fields) == 3, ranks[other]
        assert ranks[other]['code'] not in (None, 0)
        assert ranks[other]['seconds'] < TIMEOUT + LAST_WORDS
        awaited[other] = fields['waits for']
    if what == 'eviction':
        taken = 'pipeline rank 3 (global rank 3) to take activations of stage 0 microbatch 5'
        assert awaited[0] == taken


@pytest.mark.parametrize(
    ('case', 'victim'), [('blocking, one killed', 1), ('blocking, first killed', 0)]
)
def test_a_rank_is_killed_on_a_backend_that_blocks(ended, case, victim):
    """Nobody hears of it; all know who it was once their time is over."""
    ranks = ended[case]
    assert ranks[victim]['code'] == -9
    for rank in {*range(len(ranks))} - {victim}:
        title, fields = report(ranks[rank])
        assert title.endswith(f'no step forward for {TIMEOUT:g} s')
        assert ranks[rank]['code'] == EXIT_CODE
        assert ranks[rank]['seconds'] < TIMEOUT + LAST_WORDS
        assert accused(fields) == victim, ranks[rank]


@pytest.mark.parametrize('case', ['slow pass', 'long pause'])
def test_no_false_alarm(ended, case):
    """Half of the time in one pass, or longer than the time between two iterations."""
    assert [rank['code'] for rank in ended[case]] == [0, 0, 0], ended[case]
    assert not any(_NO_NAME.sub('', rank['said']) for rank in ended[case])


AT_ITS_END = """
import atexit, sys, time
import torch.distributed as dist
from megatron_zbpp.runtime.guard.watchdog import Watchdog

dist.init_process_group('gloo', f'file://{sys.argv[1]}', rank=0, world_size=1)
atexit.register(time.sleep, 50)
with Watchdog(2).collective('some barrier'):
    raise ValueError('what failed')
"""


def test_hanging_while_python_ends(tmp_path):
    """Where 3.12 and later begin no thread."""
    command = [sys.executable, '-c', AT_ITS_END, tmp_path / 'met']
    done = run(command, env={'PYTHONPATH': str(ROOT)}, timeout=40)
    assert done.returncode == EXIT_CODE, done.stderr
    assert 'ended after its failure' in done.stderr


PAUSING = """
import sys, time
import torch.distributed as dist
from megatron_zbpp.runtime.guard.watchdog import Watchdog

def save():
    time.sleep(4)

dist.init_process_group('gloo', f'file://{sys.argv[1]}', rank=0, world_size=1)
watchdog = Watchdog(1)
watchdog.limit_pauses(float(sys.argv[2]))
with watchdog.collective('some step'):
    pass
save()
"""


@pytest.mark.parametrize('limit', [2, 0])
def test_pause(tmp_path, limit):
    """What comes after a step may last longer than a step, and not for ever."""
    command = [sys.executable, '-c', PAUSING, tmp_path / 'met', limit]
    done = run(command, env={'PYTHONPATH': str(ROOT)}, timeout=40)
    if not limit:
        assert (done.returncode, done.stderr) == (0, '')
        return
    assert done.returncode == EXIT_CODE
    title, fields = report({'said': done.stderr})
    assert title.endswith('no step forward for 2 s')
    assert fields['now'].startswith('between passes, in save (')
    assert fields['waits for'] == 'no collective call of torch.distributed'


def test_pauses_are_long():
    """Unless something else is asked for."""
    assert Watchdog(1)._pause_timeout == 600
    assert Watchdog(300)._pause_timeout == 3000


def test_negative_timeout_is_refused():
    with pytest.raises(ValueError, match='-1 is negative'):
        Watchdog(-1)
    with pytest.raises(ValueError, match='-1 is negative'):
        Watchdog(1).limit_pauses(-1)
