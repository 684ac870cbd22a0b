"""Steps that are validated later, and what is read before them, in NVIDIA loops: same numbers."""

import functools
from contextlib import contextmanager
from unittest import mock

import events
import pytest
from grids import grid
from nvidia import EARLY, WITHOUT_STATE, by, needs_training, run
from supported import supports
from test_launch import DISTRIBUTED, MOE, NO_CLIPPING, OVERLAP, PIPELINE, growing

pytestmark = needs_training


FP16 = ['--fp16', '--initial-loss-scale', 1024, '--hysteresis', 1]
UNTIED = ['--untie-embeddings-and-output-weights']
# name: processes, schedule, flags, event
GATHER = ['--bf16', *DISTRIBUTED, *OVERLAP, '--overlap-param-gather', '--eval-interval', 4]
SPARSE = [*MOE, '--disable-bias-linear', '--clip-grad', 3]
CASES = {
    'fp16 that overflows': (2, 'zb-v', FP16, events.Overflow(4, 0)),
    'overlap-param-gather': (4, 'zb-h1', GATHER, events.nothing),
    'moe': (2, 'zb-v', SPARSE, events.nothing),
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
    argv += [*FP16, *DISTRIBUTED, *OVERLAP]
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
    argv = ['--pipeline-model-parallel-size', 2, '--clip-grad', 100, *growing(ranks, 7)]
    argv += ['--pipeline-schedule', 'zb-v']
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


POSITIONS = ['--max-position-embeddings', 32]  # of which the data has 16: the rest get zeros
UNUSED = 16 * 32
FLAGS = [*PIPELINE, *POSITIONS, *NO_CLIPPING, *WITHOUT_STATE, '--train-iters', 4]
FLAGS += ['--log-interval', 4, '--save-wgrads-interval', 2]
FLAGS += ['--log-num-zeros-in-grad', '--log-params-norm']
OPTIMIZERS = {'plain': [], 'distributed': DISTRIBUTED}


@pytest.fixture(scope='module')
def stock(ranks, tmp_path_factory):
    """By flags: what Megatron's own 1F1B gives and has dumped, from one checkpoint of its own."""
    start = tmp_path_factory.mktemp('start')
    saving = ['--save', start, '--save-interval', 1, '--no-save-optim']
    run(ranks(4), *PIPELINE, *POSITIONS, '--train-iters', 4, '--exit-interval', 1, *saving)

    @functools.cache
    def trained(*more):
        folder = tmp_path_factory.mktemp('dumps')
        flags = ['--load', start, '--ckpt-step', 1, '--save', folder, '--save-interval', 100, *more]
        return run(ranks(4), *FLAGS, *flags, event=events.Dumps(folder))

    return trained


def numbers(norms):
    return {iteration: float.fromhex(norm) for iteration, norm in norms.items()}


def dumped(found):
    together = {}
    for each in found.reported:
        for iteration, values in each.items():
            together.setdefault(iteration, {}).update(values)
    return together


@supports("NVIDIA's loop: dumps of gradients, {optimizer} optimizer")
@grid(
    schedule=('zb-h1', 'zb-v+post-validation', 'zb-v'),
    optimizer=('plain', 'distributed', 'distributed'),
    overlap=(False, False, True),
)
def test_as_by_megatron(stock, schedule, optimizer, overlap):
    """Dumps of stock are those of the plain reduction: see limits on the overlapped one."""
    overlapped = OVERLAP if overlap else []
    plain = stock(*OPTIMIZERS[optimizer])
    expected = stock(*OPTIMIZERS[optimizer], *overlapped)
    found = stock(*OPTIMIZERS[optimizer], *overlapped, *by(schedule))
    gradients = dumped(plain)
    assert list(gradients) == ['iter_0000002', 'iter_0000004']
    assert dumped(found) == gradients
    scattered = bool(overlapped) and optimizer == 'distributed'
    assert (dumped(expected) == gradients) != scattered, 'see limits'
    assert found.losses == expected.losses and found.parameters == expected.parameters
    assert min(expected.zeros.values()) >= UNUSED and found.zeros == expected.zeros
    if schedule == 'zb-h1':
        assert found.grad_norms == expected.grad_norms
        assert found.param_norms == expected.param_norms
    for name in ('grad_norms', 'param_norms'):
        ours, theirs = (numbers(getattr(each, name)) for each in (found, expected))
        assert ours == pytest.approx(theirs, rel=1e-6)
