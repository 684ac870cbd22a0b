"""What cannot work is refused by every rank, at once; a rank that is killed is resumed."""

import contextlib
import json
import os
import re
import sys

import commands
import forked
import psutil
import pytest
from example import MODEL, run, train
from nvidia import EARLY, require_same
from outcome import error_of, outcome
from paths import ROOT, SUPPORT

EXAMPLE = ROOT / 'examples' / 'gpt' / 'pretrain_gpt.py'
SCHEDULE, PIPELINE = '--pipeline-schedule', '--pipeline-model-parallel-size'
SOUND = [*MODEL, SCHEDULE, 'zb-v', PIPELINE, '2', *'--num-layers 4 --global-batch-size 4'.split()]
SOUND += ['--train-iters', '2']


def torchrun(run, num_ranks, *words):
    """Runs the example, or a script that does so, under torchrun: exit code, standard error."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']
    env = {'PYTHONPATH': f'{ROOT}:{EXAMPLE.parent}', 'LAUNCHED_BY': str(os.getpid())}
    # reports come at once; the rest is starting on a busy machine
    done = run([*command, num_ranks, *words], env=env, timeout=150)
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


def train_with(ranks, metrics, *words):
    return ranks(2).run(error_of, train, [*SOUND, *map(str, words)], metrics)


def test_refused_while_others_load(ranks, tmp_path):
    for said in train_with(ranks, tmp_path / 'metrics', '--load', '/nowhere'):
        assert 'no checkpoint in --load /nowhere' in said


DIVERGES = ['--lr', '1e30', '--train-iters', '5']


def test_a_loss_that_is_no_number():
    """It ends the training, as it ends NVIDIA's loop; who wants to go on says so."""
    code, error = torchrun(forked.run, 2, EXAMPLE, *SOUND, *DIVERGES)
    assert code != 0 and 'the loss is nan: lower --lr' in error, error


def test_a_loss_that_may_be_no_number(ranks, data, tmp_path):
    words = [*DIVERGES, '--no-check-for-nan-in-loss-and-grad', '--data-path', data]
    metrics = tmp_path / 'metrics'
    assert train_with(ranks, metrics, *words) == [None, None]
    assert metrics.read_text().count('"loss": "nan"') > 1


@pytest.mark.on_ranks('num_ranks')
@pytest.mark.parametrize(
    ('words', 'num_ranks', 'said'),
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
def test_refused_by_the_parser(words, num_ranks, said):
    import pretrain_gpt

    found = outcome(pretrain_gpt.parse_args, [*SOUND, *words.split()])
    assert found.code == 2 and re.search(said, found.said), found


def test_checkpoint_of_another_model(ranks, data, tmp_path):
    common = ['--data-path', data, '--num-layers', 4, PIPELINE, 2, '--global-batch-size', 2]
    saving = ['--save', tmp_path / 'checkpoint', '--train-iters', 1, SCHEDULE, 'zb-v']
    run(ranks(2), *common, *saving)
    words = ['--num-layers', 6, '--load', tmp_path / 'checkpoint', '--data-path', data]
    for said in train_with(ranks, tmp_path / 'metrics', *words):
        assert '--num-layers was 4 and is 6' in said


NUM_RANKS = 4


def killed_and_resumed(ranks, data, folder, run_command, words, more, *where):
    """A training of four ranks in which one dies, and which goes on from its checkpoint as if
    nothing had happened: its standard error, and losses of iterations before."""
    common = ['--data-path', data, '--num-layers', 8, PIPELINE, NUM_RANKS, *words.split()]
    whole = run(ranks(NUM_RANKS), *common)
    checkpoints, metrics = folder / 'checkpoints', folder / 'broken.jsonl'
    saving = ['--save', checkpoints, '--save-interval', 2, '--metrics-file', metrics]
    words = [*MODEL, *common, *more, *saving, '--pipeline-watchdog-timeout', 60]
    code, error = torchrun(run_command, NUM_RANKS, SUPPORT / 'doomed.py', *where, *words)
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
    words = f'--global-batch-size 8 --train-iters 7 {SCHEDULE} {schedule}'
    given = ranks, data, tmp_path, commands.run, words, more
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
    words = f'--global-batch-size 6 --train-iters 6 {SCHEDULE} zb-v --clip-grad 100'
    given = ranks, data, tmp_path, forked.run, words, EARLY
    # of twelve forwards that follow after the fifth iteration begins, the last are of the sixth
    error, before = killed_and_resumed(*given, 2, 5, 'forward', 12)
    assert 'pipeline watchdog: global rank' in error, error
    assert len(before) in (4, 5), 'the last rank may have validated the fifth step'
