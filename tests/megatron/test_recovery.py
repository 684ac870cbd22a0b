"""A rank is killed: the others say where they stand; resumed, it is as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys

import commands
import psutil
import pytest
from example import MODEL, run
from paths import ROOT, SUPPORT
from test_bad_input import survivors

pytestmark = pytest.mark.one_release

SCRIPT = SUPPORT / 'doomed.py'
TIMEOUT = 60
NUM_RANKS = 4


def killed(argv, rank, iteration, what, count):
    """Runs the example under torchrun until `rank` dies: its exit code and standard error.

    Args:
        argv: of the example.
        rank, iteration, what, count: where, see `doomed.py`.
    """
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node']
    done = commands.run(
        [*command, NUM_RANKS, SCRIPT, rank, iteration, what, count, *MODEL, *argv],
        env={'PYTHONPATH': f'{ROOT}:{ROOT / "examples" / "gpt"}'},
        timeout=150,  # the reports come at once; the rest is starting on a busy machine
    )
    return done.returncode, done.stderr


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


@pytest.mark.full
@pytest.mark.parametrize('amid', AMID)
def test_resume_after_a_rank_was_killed(ranks, data, tmp_path, amid):
    schedule, flags, rank, *where = AMID[amid]
    common = ['--data-path', data, '--num-layers', 8, '--pipeline-model-parallel-size', NUM_RANKS]
    common += ['--global-batch-size', 8, '--train-iters', 7, '--pipeline-schedule', schedule]
    whole = run(ranks(NUM_RANKS), *common)
    common += flags

    checkpoints, metrics = tmp_path / 'checkpoints', tmp_path / 'broken.jsonl'
    saving = ['--save', checkpoints, '--save-interval', 2, '--metrics-file', metrics]
    watchdog = ['--pipeline-watchdog-timeout', TIMEOUT]
    code, error = killed([*common, *saving, *watchdog], rank, 6, *where)
    assert code != 0
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

    before = [json.loads(line)['loss'] for line in metrics.read_text().splitlines()]
    assert len(before) == 5, 'killed in the sixth iteration'
    assert (checkpoints / 'latest_checkpointed_iteration.txt').read_text() == '4'
    after = run(ranks(NUM_RANKS), *common, '--load', checkpoints)
    assert len(after.losses) == 3
    assert tuple(before) == whole.losses[:5]
    assert tuple(before[:4]) + after.losses == whole.losses
    assert after.parameters == whole.parameters
    assert after.optimizer == whole.optimizer
    assert not survivors(SCRIPT)


def test_resume_after_a_rank_was_killed_before_its_step_was_validated(ranks, data, tmp_path):
    """In a forward of the next iteration that it had begun after a speculative step."""
    common = ['--data-path', data, '--num-layers', 8, '--pipeline-model-parallel-size', NUM_RANKS]
    common += ['--global-batch-size', 6, '--train-iters', 6, '--pipeline-schedule', 'zb-v']
    common += ['--clip-grad', 100]
    whole = run(ranks(NUM_RANKS), *common)

    early = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 1]
    checkpoints, metrics = tmp_path / 'checkpoints', tmp_path / 'broken.jsonl'
    saving = ['--save', checkpoints, '--save-interval', 2, '--metrics-file', metrics]
    watchdog = ['--pipeline-watchdog-timeout', TIMEOUT]
    # of twelve forwards that follow after the fifth iteration begins, the last are of the sixth
    code, error = killed([*common, *early, *saving, *watchdog], 2, 5, 'forward', 12)
    assert code != 0
    assert 'Signal 9 (SIGKILL) received by PID' in error
    assert 'pipeline watchdog: global rank' in error, error
    before = [json.loads(line)['loss'] for line in metrics.read_text().splitlines()]
    assert len(before) in (4, 5), 'the last rank may have validated the fifth step'
    after = run(ranks(NUM_RANKS), *common, *early, '--load', checkpoints)
    assert tuple(before[:4]) + after.losses == whole.losses
    assert after.parameters == whole.parameters
    assert after.optimizer == whole.optimizer
