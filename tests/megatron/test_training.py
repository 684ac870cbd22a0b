"""What else a training run does, by every schedule."""

from __future__ import annotations

import pytest
from example import run
from models import Job, assert_same, reference, train
from supported import supports

COMMON = ['--num-layers', 4, '--pipeline-model-parallel-size', 2, '--clip-grad', 1e9]


@supports('GPT, evaluation', '1f1b zb-h1 zb-v')
def test_evaluation(ranks, data):
    """Validation losses agree, and evaluating leaves training alone."""
    common = [*COMMON, '--data-path', data, '--global-batch-size', 4, '--train-iters', 4]
    evaluating = ['--eval-interval', 2, '--eval-iters', 2]
    reference = run(ranks(2), *common, *evaluating, '--pipeline-schedule', 'megatron')
    assert len(reference.validation) == 2
    for schedule in ('1f1b', 'zb-h1', 'zb-v'):
        trained = run(ranks(2), *common, *evaluating, '--pipeline-schedule', schedule)
        assert trained.validation == reference.validation, schedule
        assert trained.losses == reference.losses, schedule


@pytest.mark.shared
@supports('GPT, {option}', 'zb-h1 zb-v')
@pytest.mark.parametrize(
    'option',
    ['--use-distributed-optimizer', '--overlap-grad-reduce', '--tensor-model-parallel-size=2'],
)
def test_more_parallelism(ranks, data, option):
    """Two pipelines side by side, and two ranks to a stage."""
    common = [*COMMON, '--data-path', data, '--global-batch-size', 8, '--train-iters', 4, option]
    reference = run(ranks(4), *common, '--pipeline-schedule', 'megatron')
    for schedule in ('zb-h1', 'zb-v'):
        trained = run(ranks(4), *common, '--pipeline-schedule', schedule)
        assert trained.losses == reference.losses, schedule
        assert trained.parameters == reference.parameters, schedule


@supports('`defer_embedding_wgrad_compute` in the config of a program', '{schedule}')
@pytest.mark.parametrize('schedule', ['zb-h1', 'zb-v'])
def test_the_embedding_deferred(ranks, data, schedule):
    """As without: the plugin takes it back before the model is built."""
    plain, deferred = (Job(kind, te=False, fused=True) for kind in ('dense', 'embedding deferred'))
    trained = ranks(2).run(train, deferred, deferred.argv(schedule, False, data))
    assert_same(trained, reference(ranks, data, plain))
