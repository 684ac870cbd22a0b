"""The flag of post-validation in NVIDIA's training loop: same numbers, and nobody waits."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import events
import pytest
from nvidia import known, needs_training, run
from supported import supports
from test_launch import DISTRIBUTED, MOE, OVERLAP, PIPELINE

pytestmark = needs_training

EARLY = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 1]
UNTIED = ['--untie-embeddings-and-output-weights']
# name: processes, schedule, flags, event
CASES = {
    'fp16 that overflows': (
        2,
        'zb-v',
        ['--fp16', '--initial-loss-scale', 1024, '--hysteresis', 1],
        events.Overflow(4, 0),
    ),
    'overlap-param-gather': (
        4,
        'zb-h1',
        ['--bf16', *DISTRIBUTED, *OVERLAP, '--overlap-param-gather', '--eval-interval', 4],
        events.nothing,
    ),
    'moe': (2, 'zb-v', [*MOE, '--disable-bias-linear', '--clip-grad', 3], events.nothing),
}


@pytest.mark.parametrize(
    'case',
    [
        pytest.param(case, marks=supports("NVIDIA's loop: {case}", f'{schedule}+post-validation'))
        for case, (_, schedule, *_) in CASES.items()
    ],
)
def test_identical_to_synchronous(ranks, case):
    size, schedule, flags, event = CASES[case]
    clipping = [] if '--clip-grad' in flags else ['--clip-grad', 100]
    argv = [*PIPELINE, '--train-iters', 6, '--pipeline-schedule', schedule, *clipping, *flags]
    argv += ['--log-num-zeros-in-grad']
    synchronous = run(ranks(size), *argv, event=event)
    assert case == 'moe' or any(synchronous.zeros.values())
    assert run(ranks(size), *argv, *EARLY, event=event) == synchronous


@pytest.mark.parametrize('rank', [0, 3])
def test_overflow_before_the_reduction(ranks, rank):
    """It reaches the shards of one replica by the reduction, and the other ranks by the flag."""
    argv = [*PIPELINE, '--train-iters', 6, '--pipeline-schedule', 'zb-v', '--clip-grad', 100]
    argv += ['--fp16', '--initial-loss-scale', 1024, '--hysteresis', 1, *DISTRIBUTED, *OVERLAP]
    event = events.ReducedOverflow(5, rank)
    synchronous = run(ranks(4), *argv, event=event)
    assert [synchronous.losses[i][-1] for i in (4, 5, 6)] == ['done', 'skipped', 'done']
    assert run(ranks(4), *argv, *EARLY, event=event) == synchronous


@contextmanager
def engaged(training):
    """Whether steps go on being taken early, behind each of them."""
    from megatron_zbpp.post_validation.protocol import EarlyStepPolicy

    found, original = [], EarlyStepPolicy.after

    def after(self, *step, **more):
        original(self, *step, **more)
        found.append(self.engaged)

    with mock.patch.object(EarlyStepPolicy, 'after', after):
        yield found


def test_steps_that_no_rank_tried(ranks):
    """Overflows of the first rank, while the loss scale falls: nothing is taken back, no pause."""
    argv = [*PIPELINE, '--train-iters', 12, '--pipeline-schedule', 'zb-h1', '--clip-grad', 100]
    argv += ['--fp16', '--initial-loss-scale', 2**24, '--hysteresis', 1]
    early = [*EARLY[:-1], 0]
    found = run(ranks(2), *argv, *early, event=engaged)
    skipped = [step[-1] for step in found.losses.values()].count('skipped')
    assert 4 < skipped < 12, found.losses
    assert found.reported == ([True] * 12,) * 2
    assert found.losses == run(ranks(2), *argv).losses


@supports("NVIDIA's loop: batches that grow", 'zb-v+post-validation')
def test_batch_that_grows(ranks):
    """What was run ahead for a smaller batch is dropped."""
    argv = ['--pipeline-model-parallel-size', 2, '--clip-grad', 100]
    argv += ['--pipeline-schedule', 'zb-v']
    if '--step-batch-size-schedule' in ranks(2).run(known)[0]:
        argv += ['--train-iters', 7, '--step-batch-size-schedule', '0:2 64:4 192:8']  # tokens
    else:  # until 0.17
        argv += ['--train-samples', 28, '--lr-warmup-iters', 0, '--global-batch-size', 8]
        argv += ['--rampup-batch-size', 2, 2, 12]
    assert run(ranks(2), *argv, *EARLY) == run(ranks(2), *argv)


@pytest.mark.parametrize('schedule', ['zb-v', 'zb-2p'])
def test_nobody_waits(ranks, schedule):
    """In the last iteration, no call that all pipeline ranks must come to; else there are some."""
    argv = [*PIPELINE, '--train-iters', 5, '--pipeline-schedule', schedule, '--clip-grad', 100]
    argv += ['--log-interval', 4, *UNTIED]
    synchronous = run(ranks(2), *argv, event=events.waits)
    assert all('all_reduce in get_grad_norm_fp32' in waits for waits in synchronous.reported)
    early = run(ranks(2), *argv, *EARLY, event=events.waits)
    assert early.reported == ([], [])
    assert early.losses == synchronous.losses
