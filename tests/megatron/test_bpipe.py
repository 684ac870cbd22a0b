"""BPipe: activations on a partner between F and B; as by Megatron's own schedule, to the bit."""

from __future__ import annotations

import pytest
from grids import grid
from models import MICROBATCHES, Job, assert_same, check, reference, train
from supported import supports

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.evict.place import with_eviction

pytestmark = pytest.mark.shared


@supports('activations on a partner: GPT on {pp} ranks', 'bpipe')
@grid(pp=(4, 2), fused=(False, True), recompute=(None, 'full'), bf16=(False, True))
def test_ranks(ranks, data, pp, fused, recompute, bf16):
    """Two ranks hold no more than the bound by themselves."""
    job = Job(te=False, pp=pp, fused=fused, recompute=recompute, bf16=bf16)
    check(ranks, data, 'bpipe', job, moves=pp > 3)


@supports('activations on a partner with recompute passes: GPT', 'bpipe')
@grid(dropout=(0.0, 0.1), fused=(False, True))
def test_with_recompute_passes(ranks, data, dropout, fused):
    """What goes to the partner is the input of what runs again: of the first stage nothing.

    `tests/dist/test_partners.py` has six ranks, of which the second evicts, too.
    """
    job = Job(te=False, pp=4, again='all', dropout=dropout, fused=fused)
    trained = ranks(4).run(train, job, job.argv('bpipe', False, data))
    assert_same(trained, reference(ranks, data, job))


@supports('activations on a partner: a plan that evicts', '{schedule}')
@grid(schedule=('zb-v', 'interleaved'))
def test_a_plan_that_evicts(ranks, data, tmp_path, schedule):
    plain = build(schedule, 4, MICROBATCHES)
    costs = Costs.uniform(plain.placement)
    limits = [0.6 * peak(plain, costs)[0], *(99.0,) * 3]
    plan = with_eviction(plain, range(8), costs, limits)
    assert any(p.kind == 'E' for _, p in plan)
    file = tmp_path / 'plan.json'
    file.write_text(plan.to_json())
    check(ranks, data, schedule, Job(te=False, pp=4, file=str(file)), moves=True)


@supports('activations on a partner: dropout, and an evaluation between', 'bpipe')
def test_dropout(ranks, data):
    """As by Megatron itself: stages are where it has them."""
    check(ranks, data, 'bpipe', Job(te=False, pp=4, dropout=0.1), moves=True)


@supports('activations on a partner: optimizer steps that do not wait', 'bpipe')
def test_forwards_run_ahead(ranks, data):
    check(ranks, data, 'bpipe+post-validation', Job(te=False, pp=4), moves=True)


@supports('activations on a partner: {kind}', 'bpipe')
@pytest.mark.te
@grid(kind=('lengths', 'experts'), fused=(True, True, False))
def test_layers(te_ranks, data, kind, fused):
    """Real layers of Transformer Engine; microbatches of any length, tokens of experts."""
    te = kind != 'lengths'
    check(te_ranks, data, 'bpipe', Job(kind, te=te, pp=4, fused=fused and te), moves=True)


@pytest.mark.full
@supports('activations on a partner: tp 2', 'bpipe')
def test_sequence_parallel(ranks, data):
    check(ranks, data, 'bpipe', Job(te=False, pp=4, tp=2, bf16=True), moves=True)
