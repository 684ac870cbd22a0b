"""Compositions drawn at random, each beside all that the docs say it equals."""

from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import compositions
import pytest
from grids import some
from nvidia import needs_training

pytestmark = [needs_training, pytest.mark.alone]
SEEDS = range(100, 112)


@some('seed', SEEDS[:6], *SEEDS)
def test_promises(ranks, seed):
    """More of them: scripts/fuzz_training.py."""
    outcome = compositions.tried(ranks, compositions.draw(seed))
    assert not outcome.is_fault, outcome.said


@dataclass(frozen=True)
class Scaled:
    """Gradients are a little too large."""

    factor: float

    @contextmanager
    def __call__(self, training):
        original = training.finalize_model_grads

        def finalize_model_grads(model, *args, **kwargs):
            for parameter in model[-1].parameters():
                parameter.main_grad.mul_(self.factor)
            return original(model, *args, **kwargs)

        with mock.patch.object(training, 'finalize_model_grads', finalize_model_grads):
            yield


@pytest.mark.parametrize(
    ('techniques', 'factor'), [({}, 1 + 1e-6), ({'sliced': ['--pipeline-slices', '2']}, 1 + 1e-4)]
)
def test_a_small_error_is_a_fault(ranks, monkeypatch, techniques, factor):
    """Gradients of our schedule are scaled, those of stock and of other references are not."""
    composition = compositions.Composition(
        0,
        2,
        (),
        tuple('--pipeline-model-parallel-size 2 --global-batch-size 2 --clip-grad 1e9'.split()),
        'zb-h1',
        techniques,
        'none',
    )
    run = compositions.run

    def spoilt(ranks, argv, event):
        return run(ranks, argv, Scaled(factor) if 'zb-h1' in argv else event)

    assert compositions.tried(ranks, composition).kind == 'kept'
    monkeypatch.setattr(compositions, 'run', spoilt)
    assert compositions.tried(ranks, composition).kind == 'differs'
