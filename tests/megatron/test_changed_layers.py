"""Models that do not have each layer once: one module that runs twice, pruned, other numbers."""

from __future__ import annotations

import pytest
from grids import grid
from models import Job, check, train
from supported import refuses, supports

pytestmark = [pytest.mark.te, pytest.mark.shared]
LAYERS = 4  # over ranks: two in each chunk of a V
WHY = 'a stage cannot be told from one that was built elsewhere'


@supports('layers {change}')
@grid(
    change=('run twice', 'pruned', 'numbered from 11', 'run twice'),
    schedule=('zb-h1', 'zb-2p+post-validation', 'interleaved', 'zb-v'),
    te=(False, True),
    fused=(True, False, False, True),
    when=lambda change, schedule, **_: change == 'run twice' or schedule != 'zb-v',
)
def test_identical_to_megatron(te_ranks, data, change, schedule, te, fused):
    job = Job(layers=LAYERS, change=change, te=te, fused=fused, bf16=fused)
    check(te_ranks, data, schedule, job)


def said(job, argv):
    """What is said of the model at its first iteration."""
    try:
        train(job, argv)
    except ValueError as error:
        return str(error)
    return None


@refuses('layers {change}', WHY, 'zb-v')
@pytest.mark.parametrize('change', ['pruned', 'numbered from 11'])
def test_refused_in_a_v(ranks, data, change):
    """By name, with a schedule that takes them: see above."""
    job = Job(layers=LAYERS, change=change, te=False)
    for found in ranks(2).run(said, job, job.argv('zb-v', False, data)):
        assert found.startswith('the layers of decoder.layers were not built where the schedule')
        assert 'such as zb-h1, for layers that are pruned or have other numbers' in found
