"""What cannot work is refused by every rank, at once, such as flags that differ between ranks; a
training in which a rank is killed is resumed."""

import contextlib
import json
import os
import re
import sys
from types import SimpleNamespace
from unittest import mock

import commands
import forked
import psutil
import pytest
import torch
import torch.distributed as dist
from example import MODEL, run, train, words
from nvidia import EARLY, require_same
from outcome import error_of, outcome
from paths import ROOT, SUPPORT

from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.guard import agreement

EXAMPLE = ROOT / 'examples' / 'gpt' / 'pretrain_gpt.py'
SCHEDULE, PIPELINE = '--pipeline-schedule', '--pipeline-model-parallel-size'
SOUND = [*MODEL, SCHEDULE, 'zb-v', PIPELINE, '2', *'--num-layers 4 --global-batch-size 4'.split()]
SOUND += ['--train-iters', '2']


def torchrun(run, num_ranks, *argv):
    """Runs the example, or a script that does so, under torchrun: exit code, standard error."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']
    env = {'PYTHONPATH': f'{ROOT}:{EXAMPLE.parent}', 'LAUNCHED_BY': str(os.getpid())}
    # reports come at once; the rest is starting on a busy machine
    done = run([*command, num_ranks, *argv], env=env, timeout=150)
    return done.returncode, done.stderr


def survivors():
    """Processes of `torchrun` that still run; other tests may run the example meanwhile."""
    found = []
    for process in psutil.process_iter(['cmdline']):
        with contextlib.suppress(psutil.Error):
            if process.environ().get('LAUNCHED_BY') == str(os.getpid()):
                found.append(process.info['cmdline'])
    return found


def test_refused():
    """Each rank has its own line, and ends though there are process groups."""
    code, error = torchrun(commands.run, 2, EXAMPLE, *SOUND, '--data-path', '/nowhere/text')
    assert code != 0 and error.count('no /nowhere/text.bin') >= 2, error
    assert not survivors()


def train_with(ranks, metrics, *more):
    return ranks(2).run(error_of, train, [*SOUND, *map(str, more)], metrics)


def test_refused_while_others_load(ranks, tmp_path):
    for said in train_with(ranks, tmp_path / 'metrics', '--load', '/nowhere'):
        assert 'no checkpoint in --load /nowhere' in said


DIVERGES = ['--lr', '1e30', '--train-iters', '5']


def test_a_loss_that_is_no_number():
    """It ends the training, as it ends NVIDIA's loop; who wants to go on says so."""
    code, error = torchrun(forked.run, 2, EXAMPLE, *SOUND, *DIVERGES)
    assert code != 0 and 'the loss is nan: lower --lr' in error, error


def test_a_loss_that_may_be_no_number(ranks, data, tmp_path):
    more, metrics = ['--no-check-for-nan-in-loss-and-grad'], tmp_path / 'metrics'
    found = train_with(ranks, metrics, *DIVERGES, *more, '--data-path', data)
    assert found == [None, None] and metrics.read_text().count('"loss": "nan"') > 1


@pytest.mark.on_ranks('num_ranks')
@pytest.mark.parametrize(
    ('flags', 'num_ranks', 'said'),
    [
        (f'{SCHEDULE} zb-w', 2, "unknown schedule 'zb-w'.*zb-v.*zb-h1"),
        ('--num-layers 3', 2, '3 layers cannot be placed on 4 stages.*--num-layers'),
        (f'{PIPELINE} 1', 1, 'zb-v needs at least 2 ranks, not 1'),
        (f'{PIPELINE} 1 {SCHEDULE} dualpipe', 2, 'dualpipe needs at least 2 pipeline ranks'),
        ('--global-batch-size 0', 2, '--global-batch-size 0 is not a positive multiple'),
        ('--global-batch-size 3 --micro-batch-size 2', 2, '3 is not a positive multiple of 2'),
        (f'{PIPELINE} 3', 2, '2 processes cannot be divided'),
        (f'{SCHEDULE} megatron --pipeline-offload all', 2, f'-offload is not for {SCHEDULE} meg'),
    ],
)
def test_refused_by_the_parser(flags, num_ranks, said):
    import pretrain_gpt

    found = outcome(pretrain_gpt.parse_args, [*SOUND, *flags.split()])
    assert found.code == 2 and re.search(said, found.said), found


def test_checkpoint_of_another_model(ranks, data, tmp_path):
    common = ['--data-path', data, '--num-layers', 4, PIPELINE, 2, '--global-batch-size', 2]
    saving = ['--save', tmp_path / 'checkpoint', '--train-iters', 1, SCHEDULE, 'zb-v']
    run(ranks(2), *common, *saving)
    more = ['--num-layers', 6, '--load', tmp_path / 'checkpoint', '--data-path', data]
    for said in train_with(ranks, tmp_path / 'metrics', *more):
        assert '--num-layers was 4 and is 6' in said


NUM_RANKS = 4


def killed_and_resumed(ranks, data, folder, run_command, flags, more, *where):
    """A training of four ranks in which one dies, and which goes on from its checkpoint as if
    nothing had happened: its standard error, and losses of iterations before."""
    common = ['--data-path', data, '--num-layers', 8, PIPELINE, NUM_RANKS, *flags.split()]
    whole = run(ranks(NUM_RANKS), *common)
    checkpoints, metrics = folder / 'checkpoints', folder / 'broken.jsonl'
    saving = ['--save', checkpoints, '--save-interval', 2, '--metrics-file', metrics]
    argv = [*MODEL, *common, *more, *saving, '--pipeline-watchdog-timeout', 60]
    code, error = torchrun(run_command, NUM_RANKS, SUPPORT / 'doomed.py', *where, *argv)
    assert code != 0 and 'Signal 9 (SIGKILL) received by PID' in error, error
    before = tuple(json.loads(line)['loss'] for line in metrics.read_text().splitlines())
    assert (checkpoints / 'latest_checkpointed_iteration.txt').read_text() == '4'
    after = run(ranks(NUM_RANKS), *common, *more, '--load', checkpoints)
    assert before == whole.losses[: len(before)]
    require_same(after, whole, 4)
    return error, before


def left_by(pid):
    """Command lines of what a process has started and has not taken along."""
    started = []
    for process in psutil.process_iter(['cmdline']):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == pid:
                started.append(process.info['cmdline'])
    return started


AMID = {
    'a forward': ('zb-v', [], 0, 'forward', 11),
    'a copy to the host': ('interleaved', ['--pipeline-offload', 'all'], 1, 'storage', 20),
    'an eviction to the partner': ('bpipe', [], 0, 'storage', 3),
}


@pytest.mark.one_release
@pytest.mark.full
@pytest.mark.parametrize('amid', AMID)
def test_resume_after_a_rank_was_killed(ranks, data, tmp_path, amid):
    schedule, more, rank, *where = AMID[amid]
    flags = f'--global-batch-size 8 --train-iters 7 {SCHEDULE} {schedule}'
    given = ranks, data, tmp_path, commands.run, flags, more
    error, before = killed_and_resumed(*given, rank, 6, *where)
    assert len(before) == 5, 'killed in the sixth iteration'
    assert not survivors()
    (victim,) = re.findall(r'Signal 9 \(SIGKILL\) received by PID (\d+)', error)
    assert not left_by(int(victim)), 'such as what keeps the queue of its checkpoint writers'
    reports = re.findall(
        r'pipeline watchdog: global rank (\d) .*\n  now: (.*)\n  waits for: (.*)\n'
        r'  last passes: (.*)\n',
        error,
    )
    others = [other for other in range(NUM_RANKS) if other != rank]
    assert sorted(int(other) for other, *_ in reports) == others, error
    assert error.count(f'culprit: global rank {rank}, which does not answer') == 3, error
    assert any(f'(global rank {rank})' in awaited for _, _, awaited, _ in reports), error
    for _, now, awaited, passes in reports if amid == 'a forward' else ():
        assert re.fullmatch(r'[FBW] stage \d microbatch \d \(\d[FBW]\d\)', now), now
        assert re.fullmatch(
            r'(output|gradient) of stage \d microbatch \d from pipeline rank (\d) '
            r'\(global rank \2\)',
            awaited,
        ), awaited
        assert len(passes.split()) == 10


@pytest.mark.one_release
def test_resume_after_a_rank_was_killed_before_its_step_was_validated(ranks, data, tmp_path):
    """In a forward of the next iteration that it had begun after a speculative step."""
    flags = f'--global-batch-size 6 --train-iters 6 {SCHEDULE} zb-v --clip-grad 100'
    given = ranks, data, tmp_path, forked.run, flags, EARLY
    # of twelve forwards that follow after the fifth iteration begins, the last are of the sixth
    error, before = killed_and_resumed(*given, 2, 5, 'forward', 12)
    assert 'pipeline watchdog: global rank' in error, error
    assert len(before) in (4, 5), 'the last rank may have validated the fifth step'


# ---- Flags that differ from rank to rank: the ranks stop at once, and say which has which.


COMMON = f'--num-layers 8 {PIPELINE} 2 --train-iters 2 --log-interval 1000'.split()
COMMON += ['--pipeline-watchdog-timeout', '60']


def train_apart(flags, data, metrics, compared=True):
    """Trains with the flags of this rank; what it was told, and whether it had trained by then.
    Flags that are not `compared` are those of a program that has its own."""
    argv = [*MODEL, *COMMON, '--data-path', str(data), *flags[dist.get_rank()]]
    flags_of = agreement.comparable_flags if compared else lambda flags: {}
    try:
        with mock.patch.object(agreement, 'comparable_flags', flags_of):
            train(argv, metrics)
    except agreement.DisagreementError as error:
        return str(error), metrics.exists()
    return None


LOOP = f'{SCHEDULE} interleaved'
CHUNKS = f'{LOOP} --num-virtual-stages-per-pipeline-rank 4'
DECAY = '--lr-decay-style'
SPLIT = '--account-for-embedding-in-pipeline-split'
# flags of each rank, and what is said of each
APART = {
    'schedule': (f'{SCHEDULE} zb-v', f'{SCHEDULE} zb-h1', 'schedule: zb-v', 'zb-h1'),
    'chunks': (LOOP, CHUNKS, 'interleaved', 'interleaved with 4 chunks a rank'),
    'microbatches': ('--global-batch-size 4', '--global-batch-size 6', 'num_microbatches: 4', '6'),
    'hidden': ('--hidden-size 32', '--hidden-size 48', 'hidden_size: 32', '48'),
    'dtype': ('--bf16', '', 'bf16: True', 'False'),
    'layers': ('--num-layers 8', '--num-layers 4', 'num_layers: 8', '4'),
    'split': ('', f'{SPLIT} --num-layers 7', f'{SPLIT[2:].replace("-", "_")}: False', 'True'),
    'words': (f'{DECAY} cosine', f'{DECAY} linear', 'lr_decay_style: cosine', 'linear'),
}


@pytest.mark.parametrize(('first', 'second', 'one', 'other'), APART.values(), ids=APART)
def test_named_instead_of_hanging(ranks, data, tmp_path, first, second, one, other):
    flags = first.split(), second.split()
    for message, trained in ranks(2).run(train_apart, flags, data, tmp_path / 'metrics.jsonl'):
        assert f'{one} on rank 0; {other} on rank 1' in message
        assert not trained, 'found at start'


def test_model_is_compared_before_the_first_pass(ranks, data, tmp_path):
    flags = [['--num-layers', '8'], ['--num-layers', '4']]
    metrics = tmp_path / 'metrics.jsonl'
    for message, trained in ranks(2).run(train_apart, flags, data, metrics, False, timeout=200):
        assert message.endswith(
            'num_layers: 8 on rank 0; 4 on rank 1\n'
            '  layers (by rank and chunk): ((2, 2), (3, 3)) on rank 0; ((1, 1), (2, 2)) on rank 1'
        )
        assert not trained


SHAPE = 'message shape (sequence, micro batch, hidden)'
PLACED = [[['e', 'd'], ['d']], [['d'], ['d', 'l']]]
ELSEWHERE = [[['e'], ['d']], [['d', 'd'], ['d', 'l']]]


LAYERS = 'layers (by rank and chunk): ((2, 1), (1, 2)) on rank 0; ((1, 1), (2, 2)) on rank 1'
# changes of each rank, and what is said
FIRST = {
    'microbatches': ({}, {'m': 8}, 'number of microbatches: 4 on rank 0; 8 on rank 1'),
    'chunks': ({}, {'chunks': 1}, 'model chunks on each rank: 2 on rank 0; 1 on rank 1'),
    'shape': ({}, {'shape': (1, 1, 48)}, f'{SHAPE}: (16, 1, 32) on rank 0; (1, 1, 48) on rank 1'),
    'layers': ({'num_layers': 6}, {}, 'num_layers: 6 on rank 0; 8 on rank 1'),
    'layout': ({'layout': PLACED}, {'layout': ELSEWHERE}, LAYERS),
    'equal': ({}, {}, None),
}


@pytest.mark.parametrize(('one', 'other', 'said'), FIRST.values(), ids=FIRST)
@pytest.mark.on_ranks(2)
def test_first_iteration(one, other, said):
    """What a program without flags is told then, where each rank has its changes."""
    from megatron_zbpp.mcore.iteration.preparation import agreement
    from megatron_zbpp.mcore.session import Session

    values = {'m': 4, 'chunks': 2, 'shape': (16, 1, 32), 'dtype': torch.float32, 'num_layers': 8}
    values |= (one, other)[dist.get_rank()]
    message = Message(values['shape'], values['dtype'], torch.device('cpu'))
    layout = SimpleNamespace(layout=values.get('layout'))
    config = SimpleNamespace(num_layers=values['num_layers'], pipeline_model_parallel_layout=layout)
    own = agreement(values['m'], values['chunks'], message, False, config)
    session = Session(Settings('zb-v', watchdog_timeout=30))
    session.flags = {'data_path': ['one', 'other']}  # some flags are lists
    told = error_of(session.agree, own, dist.group.WORLD)
    assert said is None if told is None else said in told
    if told is None:  # known by now: no collective
        session.agree(own, dist.group.WORLD)
        if dist.get_rank() == 0:
            session.agree(own, dist.group.WORLD)
    session.watchdog.stop()


OWN = """
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules import family
from megatron_zbpp.schedules.construct.phases import phases


@family('mine')
def mine(num_ranks, num_microbatches):
    m = num_microbatches
    orders = (
        phases([rank], m, [({lead}, 'F', 'lead'), (m, 'F B W', 'steady')])
        for rank in range(num_ranks)
    )
    return Schedule.of('mine', Placement.loop(num_ranks), m, orders)
"""


def train_mine(module, folders, data, metrics):
    """What a training is told by the module of that name in this rank's folder, if anything."""
    argv = words(data, f'{module}:mine', '--train-iters', 2, '--pipeline-watchdog-timeout', 60)
    with mock.patch.object(sys, 'path', [str(folders[dist.get_rank()]), *sys.path]):
        return error_of(train, argv, metrics)


@pytest.mark.parametrize(('module', 'leads'), [('alike', (1, 1)), ('apart', (1, 2))])
def test_own_family(ranks, data, tmp_path, module, leads):
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder, lead in zip(folders, leads, strict=True):
        folder.mkdir()
        (folder / f'own_{module}.py').write_text(OWN.format(lead=lead))
    metrics = tmp_path / 'metrics.jsonl'
    told = ranks(2).run(train_mine, f'own_{module}', folders, data, metrics, timeout=200)
    if module == 'alike':
        assert told == [None, None] and metrics.exists()
        return
    for message in told:
        assert 'what own_apart:mine makes: mine (' in message and 'on rank 1' in message
    assert not metrics.exists()
