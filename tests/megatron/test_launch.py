"""Our flags in NVIDIA's training loop: all that people train with, how it ends, and steps that are
validated later, to the bit as without them."""

import functools
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import events
import pytest
from defined import require_defined, watched
from grids import grid, some
from nvidia import EARLY, WITHOUT_STATE, by, go_on, known, needs_training, require_same, run, since
from supported import supports

pytestmark = needs_training

PIPELINE = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 8]
# the norm is computed all the same; see docs/exactness.md on clipping
NO_CLIPPING = ['--clip-grad', 1e9]
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention
    --num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights""".split()
MOE = """--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2
    --moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall""".split()
TENSOR = ['--tensor-model-parallel-size', 2]
SEQUENCE = [*TENSOR, '--sequence-parallel', '--spec', 'specs', 'sequence_parallel']
CONTEXT = ['--context-parallel-size', 2, '--spec', 'specs', 'context']
DISTRIBUTED = ['--use-distributed-optimizer']
OVERLAP = ['--overlap-grad-reduce']
FULL = ['--recompute-granularity', 'full', '--recompute-method']

BOTH = 'zb-h1', 'zb-v'
# name: processes, flags
CASES = {
    'gpt3': (2, []),
    'untied': (2, ['--untie-embeddings-and-output-weights']),
    'llama': (2, LLAMA),
    'uneven': (2, ['--num-layers', 6]),
    'bf16': (2, ['--bf16']),
    'fp16': (2, ['--fp16', '--initial-loss-scale', 1024]),
    'per-token-loss': (2, ['--calculate-per-token-loss']),
    'recompute-uniform': (2, [*FULL, 'uniform', '--recompute-num-layers', 1]),
    'recompute-block': (2, [*FULL, 'block', '--recompute-num-layers', 1]),
    'recompute-selective': (2, ['--recompute-granularity', 'selective']),
    'tensor': (4, TENSOR),
    'sequence': (4, SEQUENCE),
    'context': (4, CONTEXT),
    'data': (4, []),
    'distributed-optimizer': (4, DISTRIBUTED),
    'overlap-grad-reduce': (4, OVERLAP),
    'overlap-param-gather': (4, [*DISTRIBUTED, *OVERLAP, '--overlap-param-gather']),
    'moe': (2, [*MOE, '--disable-bias-linear']),
    'expert-parallel': (4, [*MOE, '--expert-model-parallel-size', 2]),
    'llama-moe-bf16': (4, [*LLAMA, *MOE, '--bf16', *DISTRIBUTED, *OVERLAP]),
}


@supports("NVIDIA's loop: {case}, two-way")
@grid(
    case=('data', 'overlap-param-gather', 'distributed-optimizer', 'overlap-grad-reduce'),
    schedule=('dualpipe', 'chimera'),
)
def test_a_two_way_pipeline(ranks, tmp_path, case, schedule):
    """Each chunk reads the data of the replica whose microbatches it runs."""
    test_identical_to_megatron(ranks, tmp_path, case, schedule)


@supports("NVIDIA's loop: {case}")
@grid(case=tuple(CASES), schedule=('zb-h1', 'zb-v'))
def test_identical_to_megatron(ranks, tmp_path, case, schedule):
    """From a checkpoint of Megatron's every schedule goes on as Megatron does."""
    size, flags = CASES[case]
    flags = [*PIPELINE, *NO_CLIPPING, *flags, '--train-iters', 4]
    how = {'event': watched}
    if case == 'sequence':
        how = dict.fromkeys(('event', 'stock_event'), events.sequence_parallel)
    how |= {'at': 2, 'sharded': DISTRIBUTED[0] in flags}
    ours, stock = go_on(ranks(size), tmp_path, flags, by(schedule), **how)
    if case != 'sequence':
        require_defined(ours.reported)
    if schedule == 'zb-h1':  # ZB-V sums the norm in another order
        assert ours.grad_norms == since(4 - len(ours.losses), stock.grad_norms)


@supports("NVIDIA's loop: tied embeddings, saved by data parallel ranks", 'zb-v')
def test_tied_embeddings_are_saved_by_replicas(ranks, tmp_path):
    """A rank of a V holds the weight twice: it saves it once, and Megatron's 1F1B goes on."""
    flags = [*PIPELINE, *NO_CLIPPING, '--train-iters', 4]
    ours = run(ranks(4), *flags, *by('zb-v'), '--save', tmp_path, '--save-interval', 2)
    loading = ['--load', tmp_path, '--ckpt-step', 2]
    stock, again = (run(ranks(4), *flags, *loading, *more) for more in ([], by('zb-v')))
    require_same(stock, ours, 2)
    require_same(again, stock, optimizer=False)
    assert len(stock.losses) == 2


def test_context_is_attended_as_a_whole(ranks, tmp_path):
    """The attention of that case: over a split sequence the model learns what it learns else."""
    flags = [*PIPELINE, '--train-iters', 4]
    whole = run(ranks(2), *flags, '--save', tmp_path, '--save-interval', 1)
    split = run(ranks(4), *flags, *CONTEXT, '--load', tmp_path, '--ckpt-step', 1)
    assert split.losses.keys() == {2, 3, 4}
    for at, (loss, *_) in split.losses.items():
        expected = float.fromhex(whole.losses[at][0])
        assert float.fromhex(loss) == pytest.approx(expected, rel=1e-5)


@supports("NVIDIA's loop: an overflow of fp16", 'zb-h1 zb-v')
@pytest.mark.parametrize('rank', [0, 1])
def test_overflow_skips_the_step(ranks, tmp_path, rank):
    """An infinity in fp16: the same iteration is skipped, the loss scale backs off alike."""
    flags = [*PIPELINE, *NO_CLIPPING, '--fp16', '--initial-loss-scale', 1024, '--hysteresis', 1]
    flags += ['--train-iters', 5]
    for schedule in BOTH:
        both = {'event': events.Overflow(2, rank), 'stock_event': events.Overflow(3, rank)}
        _, stock = go_on(ranks(2), tmp_path / schedule, flags, by(schedule), **both)
        assert [values[-1] for values in stock.losses.values()].count('skipped') == 1
        assert stock.losses[4][-2] == 512


@supports("NVIDIA's loop: checkpoints go from one schedule to the next", 'zb-h1 zb-v')
def test_checkpoints_interchange(ranks, tmp_path):
    """Each saves where the one before it stopped; in the end it is one run of Megatron's."""
    flags = [*PIPELINE, *NO_CLIPPING, '--train-iters', 5, '--bf16']
    whole = run(ranks(2), *flags)
    losses, through = {}, ['--save', tmp_path, '--load', tmp_path, '--save-interval', 1]
    through += ['--exit-interval', 1]
    chunks = ['--num-virtual-stages-per-pipeline-rank', 2]
    legs = ([], ['zb-v'], chunks, ['zb-h1'], ['zb-v'])
    for leg in legs:
        schedule = leg if leg in ([], chunks) else ['--pipeline-schedule', *leg]
        event = events.aliased_sends if leg == chunks else events.nothing
        latest = run(ranks(2), *flags, *through, *schedule, event=event)
        losses |= latest.losses
    require_same(replace(latest, losses=losses), whole)


@supports("NVIDIA's loop: evaluation with another number of microbatches", 'zb-h1 zb-v')
def test_evaluation(ranks, tmp_path):
    flags = [*PIPELINE, *NO_CLIPPING, '--train-iters', 4, '--eval-iters', 2, '--eval-interval', 2]
    flags += ['--split', '80,10,10']
    if '--eval-global-batch-size' in ranks(2).run(known)[0]:
        flags += ['--eval-global-batch-size', 3]
    both = dict.fromkeys(('event', 'stock_event'), events.evaluations)
    for schedule in BOTH:
        ours, stock = go_on(ranks(2), tmp_path / schedule, flags, by(schedule), **both)
        assert len(stock.reported[-1]) >= 2
        assert ours.reported[-1] == stock.reported[-1]


@supports("NVIDIA's loop: batches that grow", 'zb-h1 zb-v')
def test_batch_size_ramp(ranks, tmp_path):
    flags = ['--pipeline-model-parallel-size', 2, *NO_CLIPPING, *growing(ranks, 6)]
    for schedule in BOTH:
        go_on(ranks(2), tmp_path / schedule, flags, by(schedule), optimizer=False)


def growing(ranks, iterations):
    if '--step-batch-size-schedule' in ranks(2).run(known)[0]:  # in tokens
        return ['--train-iters', iterations, '--step-batch-size-schedule', '0:2 64:4 192:8']
    samples = ['--train-samples', 28, '--lr-warmup-iters', 0, '--global-batch-size', 8]
    return [*samples, '--rampup-batch-size', 2, 2, 12]  # until 0.17


@supports("NVIDIA's loop: dropout", 'zb-h1')
def test_dropout_and_recompute(ranks):
    """Masks follow the order of forwards on a rank: recomputed they are the same again."""
    flags = [*PIPELINE, '--train-iters', 4, '--hidden-dropout', 0.1, '--attention-dropout', 0.1]
    recompute = [*FULL, 'uniform', '--recompute-num-layers', 1]
    stock = run(ranks(2), *flags, *recompute)
    assert run(ranks(2), *flags, *recompute, *by('zb-h1')) == stock
    vee = [*flags, *by('zb-v')]
    assert run(ranks(2), *vee, *recompute) == run(ranks(2), *vee)


def test_reduction_overlaps(ranks):
    """A bucket's reduction begins within the pass that completes it, others still to come. Megatron
    divides into buckets on the first rank of a pipeline only."""
    flags = [*PIPELINE, '--train-iters', 3, *OVERLAP, '--ddp-bucket-size', 1000]
    ours = run(ranks(4), *flags, *by('zb-v'), event=events.reductions)
    assert max(map(len, ours.reported)) > 8, 'several buckets'
    for found in ours.reported:
        ended, passes = zip(*found, strict=True)
        assert max(ended) < max(passes), 'none waits for the end of the schedule'
        assert min(ended) < max(passes) - 1, 'some begin while other passes are to come'


# ---- It leaves its way: exits, skipped iterations, re-runs.


SIGNAL, IN_STEP, NOTHING = ['--exit-signal-handler'], ['in the step'], (None, None)
# why it ends, schedule, flags, what brings it about, and what that reports; behind the second:
# amid forwards that run ahead
EXITS = [
    ('signal', 'zb-v', SIGNAL, events.Signalled(3, 1, False), ([], ['before it'])),
    ('signal', 'zb-h1+post-validation', SIGNAL, events.Signalled(3, 0, True), (IN_STEP, [])),
    ('duration', 'zb-v+post-validation', ['--exit-duration-in-mins', 40], events.Late(3), NOTHING),
    ('signal', 'zb-v+post-validation', SIGNAL, events.Signalled(3, 1, True), ([], IN_STEP)),
    ('interval', 'zb-h1+post-validation', ['--exit-interval', 4], events.nothing, NOTHING),
]
LONGER = [*PIPELINE, *NO_CLIPPING, '--train-iters', 8]


@supports("NVIDIA's loop: exit by {reason}, resumed")
@some('reason, schedule, flags, event, reported', EXITS[:3], *EXITS)
def test_resumed_after_an_exit(ranks, tmp_path, reason, schedule, flags, event, reported):
    """In the fourth iteration; runs begin behind the first."""
    start, end = tmp_path / 'start', tmp_path / 'end'
    whole = run(ranks(2), *LONGER, '--save', start, '--save-interval', 1)
    through = ['--load', start, '--ckpt-step', 1, '--save', end, '--save-interval', 100]
    ours = [*LONGER, *by(schedule)]
    first = run(ranks(2), *ours, *through, *flags, event=event)
    assert first.reported == reported and [*first.losses] == [2, 3, 4]
    assert (end / 'latest_checkpointed_iteration.txt').read_text() == '4'
    rest = run(ranks(2), *ours, '--load', end)
    require_same(replace(rest, losses=first.losses | rest.losses), whole, 1)


# early steps need two iterations alike before them
SKIPPED = [*LONGER, '--iterations-to-skip', 3, 6, 7]
AGAIN = [*PIPELINE, *NO_CLIPPING, '--train-iters', 4, '--rerun-mode', 'validate_results']


@supports("NVIDIA's loop: skipped iterations")
@grid(schedule=('zb-v', 'zb-interleaved', 'zb-h1', 'zb-v+post-validation'))
def test_skipped_as_by_megatron(ranks, tmp_path, schedule):
    """From a checkpoint of Megatron's own; forwards may have run ahead of what is skipped."""
    stock = run(ranks(2), *SKIPPED, '--save', tmp_path, '--save-interval', 1)
    assert len(stock.losses) == 5
    size = 4 if schedule == 'zb-h1' else 2  # of 4 a rank in the middle has no data
    ours = [*by(schedule), '--load', tmp_path, '--ckpt-step', 1]
    ours += ['--pipeline-model-parallel-size', size]
    require_same(run(ranks(size), *SKIPPED, *ours), stock, 1, optimizer=False)


@supports("NVIDIA's loop: iterations run again", 'zb-h1 zb-v')
def test_run_again_as_by_megatron(ranks, tmp_path):
    """On the same data; steps that are to be validated later wait, since forwards of an iteration
    would have begun before its data and random states were noted."""
    saving = ['--save', tmp_path, '--save-interval', 1]
    stock = run(ranks(2), *AGAIN, *saving, event=events.doubted)
    assert len(stock.reported[-1]['RERUNNING_IN_PLACE']) >= 3 * 8
    for schedule in ('zb-h1+post-validation', 'zb-v'):
        ours = ['--load', tmp_path, '--ckpt-step', 1, *by(schedule)]
        found = run(ranks(2), *AGAIN, *ours, event=events.doubted, waits='+' in schedule)
        require_same(found, stock, 1, optimizer=False)
        for seen in found.reported:  # from the second iteration on
            first, again = seen.values()
            assert again and again == first[-len(again) :]


@supports("NVIDIA's loop: exit in the middle of a batch, resumed", 'zb-v')
def test_resumed_where_a_batch_was_doubted(ranks, tmp_path):
    """A loss that is doubted twice: state from before that iteration is saved, and the run ends."""
    start, middle = tmp_path / 'start', tmp_path / 'middle'
    stock = run(ranks(2), *AGAIN, '--save', start, '--save-interval', 1)
    ours = [*AGAIN, *by('zb-v'), '--save', middle, '--save-interval', 100]
    loading = ['--load', start, '--ckpt-step', 1]
    first = run(ranks(2), *ours, *loading, event=events.Faulty(3))
    assert first.reported == ([16], [16]) and first.losses.keys() == {2}
    again = ['--load', middle, '--rerun-mode', 'disabled']  # else on another device only
    rest = run(ranks(2), *ours, *again)
    require_same(replace(rest, losses=first.losses | rest.losses), stock, 1)


# ---- Steps that are validated later, and what is read before them: the same numbers.


FP16 = ['--fp16', '--initial-loss-scale', 1024, '--hysteresis', 1]
# name: processes, schedule, flags, event
GATHER = ['--bf16', *DISTRIBUTED, *OVERLAP, '--overlap-param-gather', '--eval-interval', 4]
SPARSE = [*MOE, '--disable-bias-linear', '--clip-grad', 3]
VALIDATED = {
    'fp16 that overflows': (2, 'zb-v', FP16, events.Overflow(4, 0)),
    'overlap-param-gather': (4, 'zb-h1', GATHER, events.nothing),
    'moe': (2, 'zb-v', SPARSE, events.nothing),
}


@pytest.mark.parametrize(
    'case',
    [
        pytest.param(case, marks=supports("NVIDIA's loop: {case}", f'{schedule}+post-validation'))
        for case, (_, schedule, *_) in VALIDATED.items()
    ],
)
def test_identical_to_synchronous(ranks, case):
    size, schedule, flags, event = VALIDATED[case]
    clipping = [] if '--clip-grad' in flags else ['--clip-grad', 100]
    argv = [*PIPELINE, '--train-iters', 6, '--pipeline-schedule', schedule, *clipping, *flags]
    argv += ['--log-num-zeros-in-grad']
    synchronous = run(ranks(size), *argv, event=event)
    assert case == 'moe' or any(synchronous.zeros.values())
    assert run(ranks(size), *argv, *EARLY, event=event) == synchronous


@pytest.mark.parametrize('rank', [0, 3])
def test_overflow_before_the_reduction(ranks, rank):
    """It reaches the shards of one replica by the reduction, and the other ranks by the flag."""
    argv = [*PIPELINE, '--train-iters', 6, *by('zb-v'), '--clip-grad', 100]
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
def test_batch_that_grows_under_post_validation(ranks):
    """What was run ahead for a smaller batch is dropped."""
    argv = [*PIPELINE[:2], '--clip-grad', 100, *growing(ranks, 7), *by('zb-v')]
    assert run(ranks(2), *argv, *EARLY) == run(ranks(2), *argv)


@pytest.mark.parametrize('schedule', ['zb-v', 'zb-2p'])
def test_nobody_waits(ranks, schedule):
    """In the last iteration, no call that all pipeline ranks must come to; else there are some."""
    argv = [*PIPELINE, '--train-iters', 5, '--pipeline-schedule', schedule, '--clip-grad', 100]
    argv += ['--log-interval', 4, '--untie-embeddings-and-output-weights']
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
def test_dumps_are_megatrons(stock, schedule, optimizer, overlap):
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
        ours, theirs = (getattr(each, name) for each in (found, expected))
        assert ours.keys() == theirs.keys()
        assert [*map(float.fromhex, ours.values())] == pytest.approx(
            [*map(float.fromhex, theirs.values())], rel=1e-6
        )
