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
SOUND = {
    '--num-layers': 4,
    '--pipeline-model-parallel-size': 2,
    '--pipeline-schedule': 'zb-v',
    '--global-batch-size': 4,
    '--train-iters': 2,
}


def flags(changes):
    options = SOUND | {f'--{key.replace("_", "-")}': value for key, value in changes.items()}
    return [name if value is None else f'{name}={value}' for name, value in options.items()]


def torchrun(run, num_ranks, *words):
    """Runs the example, or a script that does so, under torchrun: exit code, standard error."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']
    env = {'PYTHONPATH': f'{ROOT}:{EXAMPLE.parent}', 'LAUNCHED_BY': str(os.getpid())}
    # reports come at once; the rest is starting on a busy machine
    done = run([*command, num_ranks, *words], env=env, timeout=150)
    return done.returncode, done.stderr


def launch(run=commands.run, **changes):
    return torchrun(run, 2, EXAMPLE, *MODEL, *flags(changes))


def survivors():
    """Processes of `launch` that still run; other tests may run the example meanwhile."""
    found = []
    for process in psutil.process_iter(['cmdline']):
        with contextlib.suppress(psutil.Error):
            if process.environ().get('LAUNCHED_BY') == str(os.getpid()):
                found.append(process.info['cmdline'])
    return found


def test_refused():
    """Each rank has its own line, and ends though there are process groups."""
    code, error = launch(data_path='/nowhere/text')
    assert code != 0
    assert error.count('no /nowhere/text.bin') >= 2, error
    assert not survivors()


def train_with(ranks, metrics, **changes):
    return ranks(2).run(error_of, train, [*MODEL, *flags(changes)], metrics)


def test_refused_while_others_load(ranks, tmp_path):
    for said in train_with(ranks, tmp_path / 'metrics', load='/nowhere'):
        assert 'no checkpoint in --load /nowhere' in said


def test_a_loss_that_is_no_number():
    """It ends the training, as it ends NVIDIA's loop; who wants to go on says so."""
    code, error = launch(forked.run, lr=1e30, train_iters=5)
    assert code != 0 and 'the loss is nan: lower --lr' in error, error


def test_a_loss_that_may_be_no_number(ranks, data, tmp_path):
    changes = {'lr': 1e30, 'train_iters': 5, 'no_check_for_nan_in_loss_and_grad': None}
    metrics = tmp_path / 'metrics'
    assert train_with(ranks, metrics, data_path=data, **changes) == [None, None]
    assert metrics.read_text().count('"loss": "nan"') > 1


PP = 'pipeline_model_parallel_size'


@pytest.mark.on_ranks('num_ranks')
@pytest.mark.parametrize(
    ('changes', 'num_ranks', 'said'),
    [
        ({'pipeline_schedule': 'zb-w'}, 2, ("unknown schedule 'zb-w'", 'zb-h1', 'zb-v')),
        ({'num_layers': 3}, 2, ('3 layers cannot be placed on 4 stages', '--num-layers')),
        ({PP: 1}, 1, ('zb-v needs at least 2 ranks, not 1',)),
        (
            {PP: 1, 'pipeline_schedule': 'dualpipe'},
            2,
            ('dualpipe needs at least 2 pipeline ranks',),
        ),
        ({'global_batch_size': 0}, 2, ('--global-batch-size 0 is not a positive multiple',)),
        (
            {'global_batch_size': 3, 'micro_batch_size': 2},
            2,
            ('3 is not a positive multiple of 2',),
        ),
        ({PP: 3}, 2, ('2 processes cannot be divided',)),
        (
            {'pipeline_schedule': 'megatron', 'pipeline_offload': 'all'},
            2,
            ('--pipeline-offload is not for --pipeline-schedule megatron',),
        ),
    ],
    ids=lambda value: '-'.join(value) if isinstance(value, dict) else None,
)
def test_refused_by_the_parser(changes, num_ranks, said):
    import pretrain_gpt

    found = outcome(pretrain_gpt.parse_args, [*MODEL, *flags(changes)])
    assert found.code == 2
    assert all(words in found.said for words in said), found


def test_checkpoint_of_another_model(ranks, data, tmp_path):
    common = ['--data-path', data, '--num-layers', 4, '--pipeline-model-parallel-size', 2]
    common += ['--global-batch-size', 2, '--train-iters', 1, '--pipeline-schedule', 'zb-v']
    run(ranks(2), *common, '--save', tmp_path / 'checkpoint')
    changes = {'num_layers': 6, 'load': tmp_path / 'checkpoint', 'data_path': data}
    for said in train_with(ranks, tmp_path / 'metrics', **changes):
        assert '--num-layers was 4 and is 6' in said


NUM_RANKS = 4


def killed_and_resumed(ranks, data, folder, run_command, common, more, where):
    """A training of four ranks in which one dies, and which goes on from its checkpoint as if
    nothing had happened: its standard error, and losses of iterations before."""
    common = ['--data-path', data, '--num-layers', 8, *common]
    common += ['--pipeline-model-parallel-size', NUM_RANKS]
    whole = run(ranks(NUM_RANKS), *common)
    checkpoints, metrics = folder / 'checkpoints', folder / 'broken.jsonl'
    saving = ['--save', checkpoints, '--save-interval', 2, '--metrics-file', metrics]
    words = [*MODEL, *common, *more, *saving, '--pipeline-watchdog-timeout', 60]
    code, error = torchrun(run_command, NUM_RANKS, SUPPORT / 'doomed.py', *where, *words)
    assert code != 0
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
    common = ['--global-batch-size', 8, '--train-iters', 7, '--pipeline-schedule', schedule]
    where = [rank, 6, *where]
    error, before = killed_and_resumed(ranks, data, tmp_path, commands.run, common, more, where)
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
    common = ['--global-batch-size', 6, '--train-iters', 6, '--pipeline-schedule', 'zb-v']
    common += ['--clip-grad', 100]
    # of twelve forwards that follow after the fifth iteration begins, the last are of the sixth
    where = [2, 5, 'forward', 12]
    error, before = killed_and_resumed(ranks, data, tmp_path, forked.run, common, EARLY, where)
    assert 'Signal 9 (SIGKILL) received by PID' in error
    assert 'pipeline watchdog: global rank' in error, error
    assert len(before) in (4, 5), 'the last rank may have validated the fifth step'
