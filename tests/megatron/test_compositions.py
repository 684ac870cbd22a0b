"""Techniques beside others: compositions drawn at random, each beside all that the docs say it
equals; and a technique that the package does not know (`tests/support/output_norms.py`)."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import compositions
import events
import pytest
from grids import some
from models import Job, assert_same, train
from nvidia import needs_training
from output_norms import N, training, with_norms
from test_vocabulary_training import of_ranks

from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.vocabulary.place import with_shards

pytestmark = pytest.mark.alone
SEEDS = range(100, 112)


@needs_training
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
        def scale(model, *_, **__):
            for parameter in model[-1].parameters():
                parameter.main_grad.mul_(self.factor)

        with events.before((training, 'finalize_model_grads', scale)):
            yield


@needs_training
@pytest.mark.parametrize(
    ('techniques', 'factor'), [({}, 1 + 1e-6), ({'sliced': ['--pipeline-slices', '2']}, 1 + 1e-4)]
)
def test_a_small_error_is_a_fault(ranks, monkeypatch, techniques, factor):
    """Gradients of our schedule are scaled, those of stock and of other references are not."""
    flags = tuple('--pipeline-model-parallel-size 2 --global-batch-size 2 --clip-grad 1e9'.split())
    composition = compositions.Composition(0, 2, (), flags, 'zb-h1', techniques, 'none')
    run = compositions.run

    def spoilt(ranks, argv, event):
        return run(ranks, argv, Scaled(factor) if 'zb-h1' in argv else event)

    assert compositions.tried(ranks, composition).kind == 'kept'
    monkeypatch.setattr(compositions, 'run', spoilt)
    assert compositions.tried(ranks, composition).kind == 'differs'


# ---- What a technique of one's own takes is in that file; no file of the package names it.


JOB = Job(te=False, iterations=2, microbatches=4)
UNTIED = ['--untie-embeddings-and-output-weights']
SCHEDULES = {
    'zb-v': ({}, lambda: build('zb-v', 2, 4)),
    'slices': ({}, lambda: in_slices('zb-h1', 2, 4, 4)),
    'shards': ({}, lambda: with_shards(build('zb-v', 2, 4))),
    'offload, forwards again': ({'offload': 'all', 'again': 'all'}, lambda: build('1f1b', 2, 4)),
}


def logged(job, argv):
    log = []
    training(log)
    return train(job, argv), log


@pytest.mark.parametrize('what', SCHEDULES)
def test_trains_beside_other_techniques(ranks, tmp_path, data, what):
    """All that is left is, to the bit, that of the same schedule without N, which is logged."""
    more, made = SCHEDULES[what]
    found, with_n = {}, with_norms(made())
    for name, schedule in (('plain', made()), ('norms', with_n)):
        (file := tmp_path / f'{name}.json').write_text(schedule.to_json())
        job = replace(JOB, file=str(file), **more)
        argv = [*job.argv('', False, data), *UNTIED]
        found[name] = ranks(job.size).run(logged, job, argv)
    left = {name: [each for each, _ in ranks] for name, ranks in found.items()}
    if what == 'shards':
        left = {name: of_ranks(each) for name, each in left.items()}
    assert_same(left['norms'], left['plain'], 2)
    assert not any(log for _, log in found['plain'])
    for rank, (_, log) in enumerate(found['norms']):
        passes = [p for p in with_n.passes[rank] if p.kind == N]
        assert len(log) == 2 * len(passes) and all(norm > 0 for _, norm in log)
