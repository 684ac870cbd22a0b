"""Two-way pipelines in NVIDIA's training loop: what people train with, as by Megatron's 1F1B."""

import functools
from dataclasses import replace
from itertools import product

import events
import pytest
from grids import some
from nvidia import by, go_on, known, needs_training, require_same, run
from ranks import RankError
from supported import TOLERANCE, refuses, supports
from test_launch import CONTEXT, FULL, LLAMA, MOE, NO_CLIPPING, SEQUENCE, TENSOR
from test_todays_models import PATTERN, PATTERNS, SPEC
from test_todays_models import TE_ROPE as TE
from test_todays_models import segments as divided_among

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


def flags_of(ranks, case):
    flags = [*BASE, *CASES[case][1]]
    if case == GROWING and '--step-batch-size-schedule' not in ranks(2).run(known)[0]:
        at = flags.index('--train-iters')  # until 0.17
        flags[at : at + 2] = ['--train-samples', 24, '--lr-warmup-iters', 0]
    return flags


FIRST = 'odd microbatches, learned positions'
SCHEDULES = 'dualpipe', 'chimera-zb', 'bitpipe'


@supports("NVIDIA's loop: {case}, two-way")
@some('case, schedule', [(FIRST, 'dualpipe')], *product(CASES, SCHEDULES))
def test_identical_to_megatron(ranks, tmp_path, case, schedule):
    """From a checkpoint of Megatron's, on two replicas."""
    of = {'event': event_of(case, 1), 'stock_event': event_of(case, 3), 'at': 2}
    pool, flags = ranks(CASES[case][0]), flags_of(ranks, case)
    ours, expected = go_on(pool, tmp_path, flags, by(schedule), **of)
    skipped = [loss[-1] == 'skipped' for loss in expected.losses.values()]
    assert skipped.count(True) == ('skipped' in case)
    if case == GROWING:
        losses = ours.reported[-1]
        assert losses and losses == expected.reported[-1][-len(losses) :]


EXTERNAL = ['--dataloader-type', 'external']
ASKS = [('megatron_zbpp', 'dualpipe'), ('Megatron', 'dualpipe'), ('Megatron', 'bitpipe')]


@supports("NVIDIA's loop: loaders of one's own, two-way")
@some('asks, schedule', ASKS[:1], *ASKS)
def test_external_loaders(ranks, tmp_path, asks, schedule):
    """A provider that asks for its data-parallel rank is told that of the chunk it builds for."""
    ours = [*EXTERNAL, *by(schedule)]
    flags = flags_of(ranks, FIRST)
    go_on(ranks(4), tmp_path, flags, ours, event=events.OwnLoaders(asks), at=2)


@refuses("NVIDIA's loop: loaders of one's own that do not ask, two-way", 'labels would be others')
def test_external_loaders_that_do_not_ask(ranks):
    given = [*BASE, *EXTERNAL, *by('dualpipe')]
    refused = r'this loop never asked whose: take megatron_zbpp\.data_par'
    with pytest.raises(RankError, match=refused):
        run(ranks(4), *given, event=events.OwnLoaders('group'))


@supports("NVIDIA's loop: checkpoints go from one way to two and back", '{schedules}')
@some('schedules', ['dualpipe'], 'chimera bitpipe')
def test_checkpoints_interchange(ranks, tmp_path, schedules):
    """Each saves where the one before it stopped; in the end it is one run of Megatron's."""
    turns = [None, *(each for name in schedules.split() for each in (name, None))]
    flags = [*BASE, '--bf16', '--train-iters', len(turns)]
    whole = run(ranks(4), *flags)
    losses, through = {}, ['--save', tmp_path, '--load', tmp_path, '--save-interval', 1]
    for schedule in turns:
        given = by(schedule) if schedule else []
        latest = run(ranks(4), *flags, *through, '--exit-interval', 1, *given)
        losses |= latest.losses
    require_same(replace(latest, losses=losses), whole)


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
    ours = run(ranks(size), *flags, '--load', tmp_path, '--ckpt-step', 1, *by('dualpipe'))
    assert ours.losses.keys() == {2, 3, 4}
    for at, losses in ours.losses.items():
        for mine, theirs in zip(losses[:-2], stock.losses[at], strict=False):
            assert float.fromhex(mine) == pytest.approx(float.fromhex(theirs), rel=1e-6)


@pytest.mark.te
@pytest.mark.full
@supports("NVIDIA's loop: HybridModel, {case}, two-way")
@pytest.mark.parametrize(
    ('case', 'schedule'),
    [('experts', 'dualpipe'), ('attention and MLP', 'chimera-zb'), ('more tokens', 'dualpipe')],
)
def test_hybrid(te_ranks, knows_segments, tmp_path, case, schedule):
    """Of Transformer Engine's layers."""
    pattern, *more = PATTERNS[case]
    flags = [*SPEC, *TE, *BASE, *more, '--num-layers', 8]
    theirs, ours = [PATTERN, divided_among(pattern, 2)], [PATTERN, pattern, *by(schedule)]
    go_on(te_ranks(4), tmp_path, flags, ours, theirs=theirs)
