"""What is done on the host before each iteration, and what is sent for."""

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import example
import pytest
from events import before
from example import words
from models import Job, train
from nvidia import EARLY

from megatron_zbpp.ir import F
from megatron_zbpp.runtime.executor import Executor

FEW, MANY = 4, 12  # microbatches


def calls(job, argv):
    """Calls of Python functions in the preparation of each iteration, and what is looked
    through."""
    from megatron_zbpp.mcore.iteration import preparation
    from megatron_zbpp.mcore.layers import delayed_module, transformer_engine

    counts, prepare = [], preparation.prepare

    def counting(*args, **kwargs):
        counts.append(0)
        sys.setprofile(lambda _, event, __: counts.append(counts.pop() + (event == 'call')))
        try:
            return prepare(*args, **kwargs)
        finally:
            sys.setprofile(None)

    delaying, alias_of = transformer_engine.delaying_modules, delayed_module.alias_of
    with (
        mock.patch.object(preparation, 'prepare', counting),
        mock.patch.object(transformer_engine, 'delaying_modules', wraps=delaying) as looked,
        mock.patch.object(delayed_module, 'alias_of', wraps=alias_of) as made,
    ):
        train(job, argv)
        return counts, looked.call_count, made.call_count


def prepared(ranks, data, job, schedule, microbatches):
    argv = [*job.argv(schedule, False, data), '--global-batch-size', str(microbatches)]
    return ranks(job.size).run(calls, job, argv)[0]


@pytest.mark.te
def test_layers_of_transformer_engine(te_ranks, data):
    """What a program and a model tell is looked up once, not in each iteration."""
    job = Job(bf16=True, fused=True, layers=4, iterations=4)
    (few, _, _), (many, looked, weights) = (
        prepared(te_ranks, data, job, 'zb-v', m) for m in (FEW, MANY)
    )
    assert len(many) == len(few) == 4
    assert many[2:] == few[2:], 'later iterations cost the same, however many microbatches'
    assert len({*many[2:]}) == 1
    chunks, modules, a_weight_and_a_bias = 2, job.layers * 4, 2
    assert looked == 2 * chunks, 'once to run them, once to see that the first iteration left none'
    assert weights == modules * a_weight_and_a_bias


def test_layers_of_megatron(ranks, data):
    job = Job(te=False, iterations=4)
    (few, *_), (many, *_) = (prepared(ranks, data, job, 'zb-v', m) for m in (FEW, MANY))
    assert many[2:] == few[2:] and len(few) == 4


ITERATIONS = 3


def train_noting(argv):
    """The example's training: what was sent for, and which forwards ran, in order. In a list for
    each iteration and for the evaluation between two of them: chunks as numbers, and 'F' for the
    first forward of each."""
    import pretrain_gpt

    iterations, build, batch = [], pretrain_gpt.build_model, pretrain_gpt.run_batch
    seen = []

    def build_model(args):
        models = build(args)
        synced = [partial(sync, chunk) for chunk in range(len(models))]
        models[0].config.param_sync_func = synced if len(models) > 1 else synced[0]
        return models

    def sync(chunk, parameters):
        assert list(parameters)
        seen.append(chunk)

    def note(_, p):
        if p.kind == F and p.microbatch == 0:
            seen.append('F')

    def run_batch(*args, **options):
        seen.append('begins')
        loss = batch(*args, **options)
        iterations.append(list(seen))
        seen.clear()
        return loss

    with (
        mock.patch.object(pretrain_gpt, 'build_model', build_model),
        mock.patch.object(pretrain_gpt, 'run_batch', run_batch),
        before((Executor, '_timed', note)),
        TemporaryDirectory() as folder,
    ):
        example.train(argv, Path(folder, 'metrics'))
    return iterations


@pytest.fixture
def trained(ranks, data):
    def run(schedule, *more):
        argv = words(data, schedule, '--train-iters', ITERATIONS, '--log-interval', 100, *more)
        return ranks(2).run(train_noting, argv)

    return run


def test_two_chunks(trained):
    """As by Megatron's interleaved schedule: both before the first forward, and in training."""
    for iterations in trained('zb-v', '--eval-interval', 2, '--eval-iters', 1):
        training, evaluating = ['begins', 0, 1, 'F', 'F'], ['begins', 'F', 'F']
        assert iterations == [training, training, evaluating, training]


def test_one_chunk(trained):
    """As by Megatron's 1F1B: never."""
    for iterations in trained('zb-h1'):
        assert iterations == [['begins', 'F']] * ITERATIONS


def test_forwards_that_ran_ahead(trained):
    """They have waited for their chunk: only the other is sent for."""
    found = trained('zb-v', *EARLY, '--clip-grad', 1e9)
    every = [iteration for iterations in found for iteration in iterations]
    ahead = [iteration for iteration in every if iteration[0] == 'F']
    assert ahead, 'nothing ran ahead'
    assert all(iteration == ['F', 'begins', 1, 'F'] for iteration in ahead), ahead
