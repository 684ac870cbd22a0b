"""Parameters of which other ranks keep parts are sent for before a forward waits for them."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
from example import MODEL, forget_groups

ITERATIONS = 3


def train(argv):
    """The example's training: what was sent for, and which forwards ran, in order.

    In a list for each iteration and for the evaluation between two of them: chunks as numbers, and
    'F' for the first forward of each.
    """
    import pretrain_gpt

    from megatron_zbpp.ir import F
    from megatron_zbpp.runtime.executor import Executor

    iterations, seen = [], []

    def build(args, _original=pretrain_gpt.build_model):
        models = _original(args)
        models[0].config.param_sync_func = [partial(sync, chunk) for chunk in range(len(models))]
        if len(models) == 1:
            (models[0].config.param_sync_func,) = models[0].config.param_sync_func
        return models

    def sync(chunk, parameters):
        assert list(parameters)
        seen.append(chunk)

    def timed(self, p, _original=Executor._timed):
        if p.kind == F and p.microbatch == 0:
            seen.append('F')
        return _original(self, p)

    def batch(*args, _original=pretrain_gpt.run_batch, **options):
        seen.append('begins')
        loss = _original(*args, **options)
        iterations.append(list(seen))
        seen.clear()
        return loss

    with (
        mock.patch.object(pretrain_gpt, 'build_model', build),
        mock.patch.object(pretrain_gpt, 'run_batch', batch),
        mock.patch.object(Executor, '_timed', timed),
    ):
        try:
            pretrain_gpt.train(pretrain_gpt.parse_args(argv))
        finally:
            forget_groups()
    return iterations


@pytest.fixture
def trained(ranks, data):
    def run(schedule, *more):
        argv = [*MODEL, '--pipeline-model-parallel-size', 2, '--num-layers', 4, '--log-interval']
        argv += [100, '--data-path', data, '--global-batch-size', 4, '--train-iters', ITERATIONS]
        argv += ['--pipeline-schedule', schedule, *more]
        return ranks(2).run(train, list(map(str, argv)))

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
    flags = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 1]
    found = trained('zb-v', *flags, '--clip-grad', 1e9)
    every = [iteration for iterations in found for iteration in iterations]
    ahead = [iteration for iteration in every if iteration[0] == 'F']
    assert ahead, 'nothing ran ahead'
    assert all(iteration == ['F', 'begins', 1, 'F'] for iteration in ahead), ahead
