"""Two-way pipelines train as Megatron's own 1F1B does on two replicas, to the bit."""

import functools
import io
import json
import re
import runpy
from contextlib import redirect_stdout
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from example import forget_groups, run, words
from grids import grid, some
from models import Job, _left, train
from nvidia import EARLY
from outcome import error_of
from paths import ROOT
from rows import row, trains
from supported import TOLERANCE, WAITS, refuses, supports
from test_log_line import printed

import megatron_zbpp

FAMILIES = ('chimera', 'dualpipe', 'gems', 'bitpipe', 'chimera-zb', 'chimera-doubling')
SHAPES = (2, 4), (2, 5), (2, 2), (4, 4), (2, 1), (2, 8), (4, 8)  # ranks, microbatches
CLIPPING, NO_CLIPPING = 0.5, 1e9  # the norm is computed all the same


@pytest.fixture(scope='module')
def trained(ranks, data):
    """Trains on replicas of p ranks, m microbatches each; each run once."""

    @functools.cache
    def run_of(schedule, p, m, *more, dp=2, layers=None):
        flags = ['--pipeline-model-parallel-size', p, '--num-layers', layers or 2 * p]
        flags += ['--data-path', data, '--train-iters', 3]
        flags += ['--global-batch-size', dp * m, '--pipeline-schedule', schedule]
        flags += more if '--clip-grad' in more else [*more, '--clip-grad', NO_CLIPPING]
        return run(ranks(dp * p), *flags)

    return run_of


HALF = {'te': False, 'dp': 2}
SIZES = {f'{p} ranks, {m} microbatches': {'pp': p, 'microbatches': m} for p, m in SHAPES}
test_identical_to_megatron = trains(
    '',
    HALF,
    row('GPT, fp32, two replicas', FAMILIES, layers=4, size=SIZES),
    row('GPT, fp32, two replicas, evaluation', 'dualpipe', evaluation=True),
    row('tensor parallelism', 'dualpipe', full=True, tp=2, shared=False),
)
SHARDED = {'bf16': True, 'distributed': True, 'overlap': True}
JOBS = {
    'experts': {'kind': 'experts'},
    'bf16, distributed optimizer, overlap': SHARDED | {'than': '1f1b-v'},  # of the same shards
    'lengths': {'kind': 'lengths'},
    'offload': {'offload': 'all'},
    'recompute passes': {'again': 'all'},
    'fused weight gradients': {'fused': True},
}
test_models = trains('{job}, two replicas', HALF, row('', ('dualpipe', 'chimera-zb'), job=JOBS))
test_transformer_engine = trains(
    'GPT of {kind}, two replicas',
    {'dp': 2, 'layers': 4},
    row('', 'chimera-zb', kind=('SwiGLU',)),
    row('', 'dualpipe', kind=('MLA',), bf16=True, fused=True, full=True),
    row('', 'bitpipe', kind=('grouped experts',), bf16=True, full=True),
    row('', 'chimera', kind=('dense',), bf16=True, fp8='products', full=True),
    te=True,
)


def bytes_of(models, optimizer):
    """Of this rank: weights, buffers of gradients, and state of the optimizer."""
    _, states = _left(models, optimizer)
    held = [main for _, main, _ in states.values()]
    held += [value for *_, state in states.values() for value in state.values()]
    return {
        'weights': sum(p.nbytes for model in models for p in model.parameters()),
        'gradients': sum(b.grad_data.nbytes for model in models for b in model.buffers),
        'state': sum(value.nbytes for value in held if isinstance(value, torch.Tensor)),
    }, {}


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize('distributed', [False, True])
def test_each_rank_holds_what_zb_v_holds(data, distributed):
    job = Job(bf16=True, distributed=distributed, iterations=2, microbatches=2, **HALF)
    with mock.patch('models._left', bytes_of):
        found, expected = (
            train(job, job.argv(schedule, False, data)).parameters
            for schedule in ('dualpipe', 'zb-v')
        )
    assert found == expected and all(found.values())


@supports('experts shared out over two replicas', 'dualpipe', TOLERANCE)
def test_experts_of_both_replicas(ranks, data):
    """From the turn on their tokens come from the replicas in the other order."""
    job = Job('experts', ep=2, **HALF)
    losses = [
        [rank.losses for rank in ranks(4).run(train, job, job.argv(schedule, False, data))]
        for schedule in ('dualpipe', 'megatron')
    ]
    found, expected = ({tuple(x) for x in own if x[0] is not None} for own in losses)
    assert len(found) == len(expected) == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


@supports('clipping', '{family}')
@grid(family=('chimera', 'dualpipe'))
def test_clipping_is_that_of_a_v(trained, family):
    """Norms included."""
    clip = ('--clip-grad', CLIPPING)
    expected = trained('1f1b-v', 2, 4, *clip)
    assert expected.parameters != trained('megatron', 2, 4).parameters, 'clipping must be active'
    assert trained(family, 2, 4, *clip) == expected


@supports('optimizer steps that would be validated later, two replicas', 'dualpipe', WAITS)
def test_steps_wait_for_all_ranks(trained, ranks, data, tmp_path):
    """As no rank is the first; it is said once."""
    metrics = tmp_path / 'metrics'
    more = ['--train-iters', 3, '--clip-grad', NO_CLIPPING, *EARLY]
    found = ranks(4).run(printed, words(data, 'dualpipe', *more, layers=8, m=8), metrics)
    said = [line for _, errors in found for line in errors if 'no rank is the first' in line]
    assert len(said) == 1 and 'microbatches go both ways' in said[0]
    states = json.loads(metrics.read_text().splitlines()[-1])['optimizer_sha256']
    assert states == trained('megatron', 2, 4, layers=8).optimizer


@supports('GPT, fp32, four replicas', '{family}', TOLERANCE)
@some('family', ['dualpipe'], 'chimera', 'bitpipe')
def test_four_replicas(trained, family):
    """Replicas q and q + 2 run one schedule; the sum over all four has another order."""
    found, expected = (trained(name, 2, 3, dp=4, layers=8) for name in (family, 'megatron'))
    assert found.parameters.keys() == expected.parameters.keys()
    for ours, theirs in ((found.losses, expected.losses), (found.grad_norms, expected.grad_norms)):
        assert len(set(theirs)) == 3, 'each iteration has its own'
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-6)


def numbers(texts):
    return [float.fromhex(text) for text in texts]


@refuses('a two-way pipeline on one replica', 'it runs on pairs of replicas')
@refuses('GEMS with --overlap-grad-reduce', 'the two replicas have other orders')
@pytest.mark.parametrize(
    ('family', 'p', 'more', 'change', 'message'),
    [
        ('chimera', 4, [], '', 'data-parallel size 1 is wrong because chimera runs on pairs of'),
        ('gems', 2, ['--overlap-grad-reduce'], '', 'drop overlap_grad_reduce, or take chimera'),
        ('chimera', 2, [], 'never asked', 'this loop never asked whose: take megatron_zbpp.data_'),
        ('chimera', 2, [], 'another numbering', 'numbered replica by replica: drop --use-tp-pp-dp'),
    ],
    ids=['replicas', 'orders', 'data', 'numbers'],
)
def test_what_cannot_work(ranks, data, tmp_path, family, p, more, change, message):
    argv = words(data, family, '--train-iters', 1, *more, p=p, layers=8, m=8)
    found = ranks(4).run(changed, change, argv, tmp_path / 'metrics')
    assert all(message in (each or '') for each in found), found


def shortest_program(schedule):
    """On each rank: what examples/gpt/minimal.py prints with a schedule on two replicas."""
    said = io.StringIO()
    program = runpy.run_path(str(ROOT / 'examples/gpt/minimal.py'))
    settings = {'SCHEDULE': schedule, 'REPLICAS': 2, 'ITERATIONS': 2, 'SEQUENCE': 16}
    program['main'].__globals__.update(settings, TEXT=torch.arange(2000) ** 2 % 251)
    with (
        mock.patch.object(dist, 'init_process_group'),
        mock.patch.object(dist, 'destroy_process_group'),
        redirect_stdout(said),
    ):
        program['main']()
    forget_groups()
    return re.findall(r'(iteration .*\| loss .*?) \|', said.getvalue())


def test_shortest_program(ranks):
    """Each chunk reads what it should: the losses of both replicas are those of one way."""
    found, expected = (
        sorted(ranks(4).run(shortest_program, name)) for name in ('dualpipe', 'dualpipe-v')
    )
    assert found == expected and [len(lines) for lines in found] == [0, 0, 2, 2]
    assert found[2] != found[3], 'replicas have other data'


def changed(change, argv, metrics):
    """On each rank: the example's training with something else in place of a part of it."""
    import pretrain_gpt
    from example import train
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from megatron_zbpp.mcore.techniques import two_way

    reads, step = two_way.TwoWay.data_parallel_rank, schedules.forward_step
    own, initialize = parallel_state.get_data_parallel_rank, 'initialize_model_parallel'
    names = {name: getattr(megatron_zbpp, name) for name in megatron_zbpp.__all__}
    fake = SimpleNamespace(**names | {'data_parallel_rank': lambda _: own()})
    order = functools.partial(getattr(parallel_state, initialize), order='tp-cp-ep-pp-dp')

    def own_data(face, chunk):
        reads(face, chunk)

    def exchanged_on_one_rank(face, chunk):
        return reads(face, chunk) ^ (dist.get_rank() == 2)

    def neighbours(group, copies):
        first = group.rank() // copies * copies
        return dist.get_process_group_ranks(group)[first : first + copies]

    place, name, new = {
        '': (schedules, 'forward_step', step),
        'never asked': (pretrain_gpt, 'megatron_zbpp', fake),
        'another numbering': (parallel_state, initialize, order),
        'group': (two_way, '_pair', neighbours),
        'own data': (two_way.TwoWay, 'data_parallel_rank', own_data),
        'routes': (two_way.TwoWay, 'data_parallel_rank', exchanged_on_one_rank),
    }[change]
    with mock.patch.object(place, name, new):
        return error_of(train, argv, metrics)


def trained_with(change, ranks, data, metrics, size=4):
    more = ['--train-iters', 3, '--clip-grad', NO_CLIPPING]
    argv = words(data, 'chimera', *more, layers=8, m=8)
    return ranks(size).run(changed, change, argv, metrics)


@refuses('a loop whose chunks read the data of other replicas', 'labels would be others')
@pytest.mark.parametrize('change', ['own data', 'routes'])
def test_data_of_the_wrong_replica(ranks, data, tmp_path, change):
    """One error on all ranks of the pipeline names both, before anything is updated."""
    found = set(trained_with(change, ranks, data, tmp_path / 'metrics'))
    assert len(found) == 1, found
    (message,) = found
    assert message.startswith(
        "data of rank 3 are wrong because in its microbatch 0 item['tokens'], item['labels'] are "
        'not those of rank 2, whose microbatches it goes on with: let each chunk read the data of'
    ), message
    assert not (tmp_path / 'metrics').exists()


@pytest.mark.full
def test_the_group_of_the_wrong_replica(ranks, data, tmp_path):
    """Of four: the first runs with the second, not with the third, whose data it reads."""
    found = trained_with('group', ranks, data, tmp_path / 'metrics', size=8)
    assert all('whose microbatches it goes on with' in (each or '') for each in found), found
