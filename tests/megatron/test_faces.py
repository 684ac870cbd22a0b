"""A technique that the package does not know: planned, simulated, drawn, kept in files, trained.
What it takes is in `tests/support/output_norms.py`; no file of the package names it."""

from dataclasses import replace

import pytest
from models import Job, assert_same, train
from output_norms import N, output_norms, training, with_norms
from test_vocabulary_training import of_ranks

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import F, Placement, Schedule, chain
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.render.svg import svg
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.vocabulary.place import with_shards

JOB = Job(te=False, iterations=2, microbatches=4)
UNTIED = ['--untie-embeddings-and-output-weights']


def test_planned_simulated_drawn_and_kept_in_a_file():
    placement = Placement.v(2)
    costs = Costs.uniform(placement).with_times(N=(0.25,) * 4)
    found = plan(
        [(placement, costs)], 4, graph=lambda stages: output_norms(chain(stages)), seconds=5.0
    )
    for schedule in (found.schedule, with_norms(build('zb-v', 2, 4))):
        check(schedule)
        assert schedule.graph.techniques[0].name == 'output_norms'
        assert sum(p.kind == N for _, p in schedule) == sum(p.kind == F for _, p in schedule) == 16
        again = Schedule.from_json(schedule.to_json())
        assert (again.graph, again.passes) == (schedule.graph, schedule.passes)
        plain = simulate(build('zb-v', 2, 4), costs).makespan
        assert simulate(schedule, costs).makespan > plain
        assert 'norm of the output' in svg({'N': simulate(schedule, costs)})


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
    found, kept = {}, {}
    for name, schedule in (('plain', made()), ('norms', with_norms(made()))):
        (file := tmp_path / f'{name}.json').write_text(schedule.to_json())
        job = replace(JOB, file=str(file), **more)
        argv = [*job.argv('', False, data), *UNTIED]
        found[name] = ranks(job.size).run(logged, job, argv)
        kept[name] = schedule
    left = {name: [each for each, _ in ranks] for name, ranks in found.items()}
    if what == 'shards':
        left = {name: of_ranks(each) for name, each in left.items()}
    assert_same(left['norms'], left['plain'], 2)
    assert not any(log for _, log in found['plain'])
    for rank, (_, log) in enumerate(found['norms']):
        passes = [p for p in kept['norms'].passes[rank] if p.kind == N]
        assert len(log) == 2 * len(passes) and all(norm > 0 for _, norm in log)
