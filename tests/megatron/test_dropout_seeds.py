"""Seeds of dropout: all schedules draw the masks of 1F1B, to the bit, whatever their placement."""

from collections import defaultdict
from dataclasses import replace
from unittest import mock

import pytest
from grids import grid, some
from models import Job, assert_same, train
from nvidia import by, needs_training, require_same, run
from rows import row, trains
from supported import supports
from test_launch import NO_CLIPPING, PIPELINE
from test_vocabulary_training import BOTH, OUTPUT, leave, of_ranks

from megatron_zbpp.runtime.guard.agreement import digest
from megatron_zbpp.techniques.composition import ADDED, EMBEDDING, VOCABULARY

SEEDED = 'dropout seeded as in our 1f1b with `--pipeline-dropout-seeds`'
FEW = {'te': False, 'dropout': 0.1, 'seeds': True, 'iterations': 2, 'microbatches': 4}
MORE = {
    'GPT': {},
    '4 ranks': {'pp': 4},
    'full recomputation': {'recompute': 'full'},
    'recompute passes': {'again': 'all'},
    'tensor parallel': {'tp': 2, 'shared': False},
    'experts': {'kind': 'experts', 'dp': 2, 'ep': 2},
    'noisy routing': {'kind': 'noisy routing', 'dropout': 0.0},
}
OF_TE = {
    'tensor parallel, sequence parallel': {'tp': 2},
    'experts, full recomputation': {'kind': 'grouped experts', 'recompute': 'full'},
}


BOTH_WAYS = {name: MORE[name] for name in ('GPT', 'full recomputation')}
# of each technique that can be added but recompute passes: a schedule that has it
BESIDE = {'offload': 'zb-v', 'evict': 'bpipe', VOCABULARY: 'zb-v', EMBEDDING: 'zb-v'}

test_as_1f1b = trains(
    SEEDED,
    {'te': False, 'dropout': 0.1, 'seeds': True, 'than': '1f1b'},
    # with an evaluation between, of a model that still drops
    row(
        ': {what}',
        ('zb-v', 'zb-h1', 'interleaved', 'zb-v+post-validation'),
        lambda schedule, what: '+' not in schedule or what in ('GPT', '4 ranks'),
        what=MORE,
    ),
    # both routes draw the masks of their replica's microbatches, as replicas of 1F1B do
    row(': {what}, two replicas', ('dualpipe', 'chimera-zb'), what=BOTH_WAYS, dp=2),
    row(', beside offload: GPT', BESIDE['offload'], offload='all', moves=True, full=True),
    row(', beside activations on a partner: GPT', BESIDE['evict'], pp=4, moves=True, full=True),
)
test_as_1f1b_te = trains(
    f"{SEEDED}: Transformer Engine's layers, ",
    {'bf16': True, 'dropout': 0.1, 'seeds': True, 'than': '1f1b'},
    row('{what}', ('zb-v', 'interleaved'), what=OF_TE, full=True),
    te=True,
)


@supports(SEEDED + ', beside {added}: GPT', 'zb-v')
@some('added', [EMBEDDING], VOCABULARY)
def test_beside(ranks, data, added):
    """As the table of compositions says; layers on all ranks as by 1F1B that has them there."""
    assert {*BESIDE, 'recompute'} == {*ADDED} and 'again' in MORE['recompute passes']
    job, layers = Job(**FEW), BOTH if added == EMBEDDING else OUTPUT
    found, plain = (
        of_ranks(leave(ranks, data, job, name, None, layers), layers) for name in ('zb-v', '1f1b')
    )
    assert_same(found, plain, job.iterations)


@pytest.mark.parametrize('what', [{}, MORE['noisy routing']], ids=['dropout', 'routing'])
def test_without(ranks, data, what):
    """What ranks draw differs from one placement to another; what is seeded is another."""
    found = set()
    for schedule, seeds in (('1f1b', False), ('zb-v', False), ('zb-v', True)):
        job = Job(**FEW | what | {'seeds': seeds, 'iterations': 1})
        trained = ranks(2).run(train, job, job.argv(schedule, False, data))
        found |= {tuple(rank.losses) for rank in trained if rank.losses[0] is not None}
    assert len(found) == 3


def drawn(job, argv, first):
    """Runs on a rank: the random states with which layers begin, by name, step and microbatch.
    Also, those that each step begins with."""
    from megatron.core import parallel_state

    from megatron_zbpp.mcore.dropout_seeds import DropoutSeeds
    from megatron_zbpp.mcore.side_effects import random_states

    found, ambient, tp = defaultdict(set), set(), set()

    def states():
        _, default, tracked = random_states()
        each = {'default': default, **tracked}
        return tuple((name, digest(str(each[name].tolist()))) for name in sorted(each))

    enter, before, join = DropoutSeeds._enter, DropoutSeeds.before, DropoutSeeds.join

    def entering(self, name, *of):
        enter(self, name, *of)
        if self._place is not None:
            tp.add(parallel_state.get_tensor_model_parallel_rank())
            found[(name, *self._place[1])].add(states())

    def beginning(self, step):
        before(self, step)
        ambient.add(states())

    def joining(self, session):
        join(self, session)
        self.resume(first)

    with (
        mock.patch.object(DropoutSeeds, '_enter', entering),
        mock.patch.object(DropoutSeeds, 'before', beginning),
        mock.patch.object(DropoutSeeds, 'join', joining),
    ):
        train(job, argv)
    return tp.pop(), dict(found), ambient


def by_rank(ranks, data, schedule, job, first=0):
    """By tensor-parallel rank, what all its pipeline ranks have drawn."""
    found = defaultdict(dict)
    argv = job.argv(schedule, False, data)
    for tp, states, ambient in ranks(job.size).run(drawn, job, argv, first):
        assert len(ambient) == 1, 'steps leave random states as they were'
        for place, own in states.items():
            assert len(own) == 1, 'what runs again draws the same'
            assert found[tp].setdefault(place, own) == own, 'whatever the rank'
    return found


def test_states(ranks, data):
    """All differ; on tensor-parallel ranks the default ones do not, outside of divided layers."""
    states_of(ranks, data, te=False, shared=False)


@pytest.mark.te
@pytest.mark.full
def test_states_of_sequence_parallelism(te_ranks, data):
    """There the default state of a layer is that of model parallelism."""
    states_of(te_ranks, data, te=True, shared=True)


def states_of(ranks, data, **how):
    job = Job(**FEW | {'tp': 2, 'recompute': 'full'} | how)
    found = by_rank(ranks, data, 'zb-v', job)
    assert found == by_rank(ranks, data, '1f1b', job)
    layers = {place: own for place, own in found[0].items() if place[0] != 'model'}
    names = {name for name, *_ in layers}
    assert names == {f'decoder.layers {number}' for number in range(1, 5)}
    assert len(layers) == 4 * 3 * 4  # layers, two steps and an evaluation, microbatches
    every = [state for own in found[0].values() for one in own for _, state in one]
    of_layers = {state for own in layers.values() for one in own for _, state in one}
    # the default one is as that of data parallelism, as stock's, or of model parallelism
    assert len(of_layers) == 3 * len(layers) and len({*every}) == 3 * len(found[0])
    for place, own in found[0].items():
        ((mine, theirs),) = zip(map(dict, own), map(dict, found[1][place]), strict=True)
        assert mine['model-parallel-rng'] != theirs['model-parallel-rng']
        assert (mine['default'] == theirs['default']) == (place[0] == 'model' or not job.shared)
        assert mine['data-parallel-rng'] == theirs['data-parallel-rng']
    resumed = by_rank(ranks, data, 'zb-v', replace(job, iterations=1), first=1)
    assert resumed[1] == {place: own for place, own in found[1].items() if place[1] == 1}


@supports(SEEDED + ': slices of sequences', '{schedule}')
@grid(schedule=('interleaved', 'zb-v'))
def test_slices(ranks, data, tmp_path, schedule):
    """Of one length, all schedules draw slice by slice the same, in each slice other masks."""
    from test_sliced_models import by_slices

    job = Job(**FEW | {'recompute': 'full'})
    found = [by_slices(ranks, data, tmp_path, job, name) for name in ('1f1b', schedule)]
    assert_same(*found, job.iterations)
    job = replace(job, file=str(tmp_path / f'{schedule}.json'))
    every = by_rank(ranks, data, '', job)[0]
    assert {place[3] for place in every} == {0, 1, 2, 3}, 'slices'
    assert len(set.union(*every.values())) == len(every)


def test_layers_that_run_twice(ranks, data):
    """They would draw the same masks twice."""
    job = Job(**FEW | {'change': 'run twice'})
    with pytest.raises(AssertionError, match=r'runs twice in a forward.* --pipeline-dropout-seeds'):
        ranks(2).run(train, job, job.argv('1f1b', False, data))


@supports(f"NVIDIA's loop: {SEEDED}", '{schedule}')
@needs_training
@grid(schedule=('zb-v+post-validation', 'interleaved'))
def test_resumed(ranks, tmp_path, schedule):
    """A training that goes on from a checkpoint, of another schedule, is the uninterrupted one."""
    flags = [*PIPELINE, *NO_CLIPPING, '--global-batch-size', 4, '--train-iters', 4]
    flags += ['--hidden-dropout', 0.1, '--attention-dropout', 0.1, '--pipeline-dropout-seeds']
    saves = ['--pipeline-schedule', '1f1b', '--save', tmp_path, '--save-interval', 2]
    whole = run(ranks(2), *flags, *saves)
    found = run(ranks(2), *flags, '--load', tmp_path, '--ckpt-step', 2, *by(schedule))
    assert len(found.losses) == 2
    require_same(found, whole, 2, optimizer=False)
