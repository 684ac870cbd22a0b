"""Two-way pipelines in NVIDIA's training loop: what people train with, as by Megatron's 1F1B."""

from __future__ import annotations

import functools
import itertools

import events
import pytest
from nvidia import known, needs_training, run, since
from ranks import RankError
from supported import TOLERANCE, absent, refuses, supports
from test_hybrid import PATTERNS, SPEC, TE
from test_hybrid import segments as divided_among
from test_launch import CONTEXT, FULL, LLAMA, MOE, NO_CLIPPING, SEQUENCE, TENSOR

pytestmark = needs_training

BASE = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 8, *NO_CLIPPING]
BASE += ['--num-layers', 8, '--train-iters', 4]
EXPERTS = [*MOE, '--disable-bias-linear']
FP16 = ['--fp16', '--initial-loss-scale', 1024, '--hysteresis', 1]
RECOMPUTE = [*FULL, 'uniform', '--recompute-num-layers', 1]
RAMP = ['--rampup-batch-size', 4, 4, 12, '--split', '90,10,0']
RAMP += ['--eval-iters', 1, '--eval-interval', 2]
GROWING = 'growing batches, evaluation of more microbatches'
# name: processes, flags; the first is in each run
CASES = {
    'odd microbatches, learned positions': (4, ['--global-batch-size', 10]),
    'Llama': (4, LLAMA),
    'data in cycles': (4, ['--dataloader-type', 'cyclic']),
    'tensor parallelism': (8, TENSOR),
    'sequence parallelism': (8, SEQUENCE),
    'experts': (4, EXPERTS),
    'bf16': (4, ['--bf16']),
    'fp16 with a skipped step': (4, FP16),
    'loss of each token': (4, ['--calculate-per-token-loss']),
    'recomputed layers': (4, RECOMPUTE),
    'recomputed attention': (4, ['--recompute-granularity', 'selective']),
    GROWING: (4, RAMP),
    'hashes of replicas compared': (4, ['--check-weight-hash-across-dp-replicas-interval', 1]),
    'multi-token prediction': (4, ['--mtp-num-layers', 1, *LLAMA]),
    'Muon': (4, ['--optimizer', 'muon', *LLAMA]),
}


# what happens in an iteration, counted from the start
EVENTS = {
    'fp16 with a skipped step': functools.partial(events.Overflow, rank=1),
    GROWING: lambda _: events.evaluations,
    'sequence parallelism': lambda _: events.sequence_parallel,
}


def event_of(case, iteration):
    """What happens in the third iteration, which is `iteration` of this run."""
    return EVENTS.get(case, lambda _: events.nothing)(iteration)


@pytest.fixture(scope='module')
def stock(ranks, tmp_path_factory):
    """By case: what Megatron's own 1F1B gives, and flags to go on from its checkpoint."""

    @functools.cache
    def trained(case):
        size, flags = CASES[case]
        flags = [*BASE, *flags]
        if case == GROWING and '--step-batch-size-schedule' not in ranks(2).run(known)[0]:
            at = flags.index('--train-iters')  # until 0.17
            flags[at : at + 2] = ['--train-samples', 24, '--lr-warmup-iters', 0]
        folder = tmp_path_factory.mktemp('stock')
        saving = ['--save', folder, '--save-interval', 2]
        run_of = run(ranks(size), *flags, *saving, event=event_of(case, 3))
        return run_of, [*flags, '--load', folder, '--ckpt-step', 2]

    return trained


FIRST = ('odd microbatches, learned positions', 'dualpipe')  # the case of each run


@supports("NVIDIA's loop: {case}, two-way")
@pytest.mark.parametrize(
    ('case', 'schedule'),
    [
        pytest.param(*each, marks=[pytest.mark.full] * (each != FIRST))
        for each in itertools.product(CASES, ('dualpipe', 'chimera-zb', 'bitpipe'))
    ],
)
def test_identical_to_megatron(ranks, stock, case, schedule):
    """From a checkpoint of Megatron's, on two replicas."""
    expected, flags = stock(case)
    given = ['--pipeline-schedule', schedule]
    ours = run(ranks(CASES[case][0]), *flags, *given, event=event_of(case, 1))
    assert ours.losses == since(2, expected.losses)
    assert ours.parameters == expected.parameters
    assert ours.optimizer == expected.optimizer
    skipped = [loss[-1] == 'skipped' for loss in expected.losses.values()]
    assert skipped.count(True) == ('skipped' in case)
    if case == GROWING:
        losses = ours.reported[-1]
        assert losses and losses == expected.reported[-1][-len(losses) :]


EXTERNAL = ['--dataloader-type', 'external']


@supports("NVIDIA's loop: loaders of one's own, two-way")
@pytest.mark.parametrize(
    ('asks', 'schedule'),
    [
        ('megatron_zbpp', 'dualpipe'),
        pytest.param('Megatron', 'dualpipe', marks=pytest.mark.full),
        pytest.param('Megatron', 'bitpipe', marks=pytest.mark.full),
    ],
)
def test_external_loaders(ranks, stock, asks, schedule):
    """A provider that asks for its data-parallel rank is told that of the chunk it builds for."""
    expected, flags = stock(FIRST[0])
    given = [*EXTERNAL, '--pipeline-schedule', schedule]
    ours = run(ranks(4), *flags, *given, event=events.OwnLoaders(asks))
    assert ours.losses == since(2, expected.losses)
    assert ours.parameters == expected.parameters
    assert ours.optimizer == expected.optimizer


@refuses("NVIDIA's loop: loaders of one's own that do not ask, two-way", 'labels would be others')
def test_external_loaders_that_do_not_ask(ranks):
    given = [*BASE, *EXTERNAL, '--pipeline-schedule', 'dualpipe']
    with pytest.raises(
        RankError, match=r'this loop never asked whose: take megatron_zbpp\.data_par'
    ):
        run(ranks(4), *given, event=events.OwnLoaders('group'))


@supports("NVIDIA's loop: checkpoints go from one way to two and back", '{schedules}')
@pytest.mark.parametrize(
    'schedules', ['dualpipe', pytest.param('chimera bitpipe', marks=pytest.mark.full)]
)
def test_checkpoints_interchange(ranks, tmp_path, schedules):
    """Each saves where the one before it stopped; in the end it is one run of Megatron's."""
    turns = [None, *(each for name in schedules.split() for each in (name, None))]
    flags = [*BASE, '--bf16', '--train-iters', len(turns)]
    whole = run(ranks(4), *flags)
    losses, through = {}, ['--save', tmp_path, '--load', tmp_path, '--save-interval', 1]
    for schedule in turns:
        given = ['--pipeline-schedule', schedule] if schedule else []
        latest = run(ranks(4), *flags, *through, '--exit-interval', 1, *given)
        losses |= latest.losses
    assert losses == whole.losses
    assert latest.parameters == whole.parameters
    assert latest.optimizer == whole.optimizer


# of whose sums over replicas another order is seen
OTHER_SUMS = {
    'experts shared out over the pair': (4, [*EXPERTS, '--expert-model-parallel-size', 2]),
    'experts shared out in each half': (8, [*EXPERTS, '--expert-model-parallel-size', 2]),
    'context parallelism': (8, CONTEXT),
}


@supports("NVIDIA's loop: {case}, two-way", 'dualpipe', TOLERANCE)
@pytest.mark.full
@pytest.mark.parametrize('case', OTHER_SUMS)
def test_within_tolerance(ranks, tmp_path, case):
    """Sums over four ranks, and tokens of a pair's experts, have another order from the turn on."""
    size, flags = OTHER_SUMS[case]
    flags = [*BASE, *flags]
    stock = run(ranks(size), *flags, '--save', tmp_path, '--save-interval', 1)
    loading = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', 'dualpipe']
    ours = run(ranks(size), *flags, *loading)
    assert ours.losses.keys() == {2, 3, 4}
    for at, losses in ours.losses.items():
        for mine, theirs in zip(losses[:-2], stock.losses[at], strict=False):
            assert float.fromhex(mine) == pytest.approx(float.fromhex(theirs), rel=1e-6)


@pytest.mark.te
@supports("NVIDIA's loop: HybridModel, {case}, two-way")
@pytest.mark.parametrize(
    ('case', 'schedule'),
    [
        pytest.param('experts', 'dualpipe', marks=pytest.mark.full),
        pytest.param('attention and MLP', 'chimera-zb', marks=pytest.mark.full),
        pytest.param('more tokens', 'dualpipe', marks=pytest.mark.full),
    ],
)
def test_hybrid(te_ranks, tmp_path, case, schedule):
    """Of Transformer Engine's layers."""
    if '--hybrid-layer-pattern' not in te_ranks(2).run(known)[0]:
        absent('hybrid models have segments from 0.17 on')
    pattern, *more = PATTERNS[case]
    flags = [*SPEC, *TE, *BASE, *more, '--num-layers', 8]
    divided = ['--hybrid-layer-pattern', divided_among(pattern, 2)]
    stock = run(te_ranks(4), *flags, *divided, '--save', tmp_path, '--save-interval', 1)
    loading = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', schedule]
    ours = run(te_ranks(4), *flags, '--hybrid-layer-pattern', pattern, *loading)
    assert ours.losses == since(1, stock.losses)
    assert ours.parameters == stock.parameters
    assert ours.optimizer == stock.optimizer
