"""Forwards that run again in passes of their own: as by Megatron's own schedule, to the bit."""

from __future__ import annotations

import pytest
from grids import grid
from models import KINDS, Job, check
from supported import supports

pytestmark = pytest.mark.shared


@supports('recompute passes: GPT', '{schedule}')
@grid(
    schedule=('gpipe', 'zb-v', 'interleaved'),
    again=('all', 'half', '1'),
    fused=(False, True),
    recompute=(None, 'full'),
)
def test_families(ranks, data, schedule, again, fused, recompute):
    """W split from B and not; with Megatron's recomputation of layers inside."""
    job = Job(te=False, again=again, fused=fused, recompute=recompute)
    check(ranks, data, schedule, job)


@pytest.mark.full
@supports('recompute passes: GPT on 4 ranks', '{schedule}')
@pytest.mark.parametrize('schedule', ['gpipe', 'zb-v'])
def test_four_ranks(ranks, data, schedule):
    check(ranks, data, schedule, Job(te=False, pp=4, again='all'))


@supports('recompute passes with offload: GPT', '{schedule}')
@grid(
    schedule=('po', 'interleaved', '1f1b'),
    again=('1', 'all', 'half'),
    offload=('all', 'half', '1'),
    fused=(True, False),
    dropout=(0.0, 0.0, 0.1),
)
def test_with_offload(ranks, data, schedule, again, offload, fused, dropout):
    """What does not run again is on the host; where all of a rank does, the input is."""
    job = Job(te=False, again=again, offload=offload, fused=fused, dropout=dropout)
    check(ranks, data, schedule, job, than=schedule if dropout else 'megatron')


@supports('recompute passes with offload: optimizer steps that do not wait', '{schedule}')
@pytest.mark.full
@grid(schedule=('1f1b', 'zb-h1'))
def test_with_offload_ahead(ranks, data, schedule):
    job = Job(te=False, again='all', offload='all')
    check(ranks, data, f'{schedule}+post-validation', job)


@pytest.mark.te
@pytest.mark.full
@supports("recompute passes with offload: {kind} layers of Transformer Engine's", '{schedule}')
@grid(kind=('dense', 'experts', 'MLA'), schedule=('zb-v', 'interleaved'), tp=(1, 2))
def test_with_offload_te(te_ranks, data, kind, schedule, tp):
    job = Job(kind, bf16=True, fused=True, again='1', offload='all', tp=tp)
    check(te_ranks, data, schedule, job)


@pytest.mark.te
@supports('recompute passes: {shape}', '{schedule}')
@grid(
    shape=('tp 2', 'ep 2'),
    schedule=('zb-v', 'interleaved'),
    fused=(True, False),
)
def test_shapes(te_ranks, data, shape, schedule, fused):
    """Sequence parallelism; experts, and gradients that are reduced while passes run."""
    sizes = {
        'tp 2': {'tp': 2},
        'ep 2': {'dp': 2, 'ep': 2, 'overlap': True, 'distributed': True},
    }[shape]
    kind = 'experts' if shape == 'ep 2' else 'dense'
    check(te_ranks, data, schedule, Job(kind, again='all', fused=fused, bf16=True, **sizes))


@supports('recompute passes: dropout, and an evaluation between', '{schedule}')
@grid(schedule=('zb-h1', 'zb-v'), recompute=(None, None, 'full'))
def test_dropout(ranks, data, schedule, recompute):
    """R draws the masks of its F; where stages are Megatron's, they are Megatron's own."""
    job = Job(te=False, again='all', dropout=0.1, recompute=recompute)
    than = schedule if schedule == 'zb-v' else 'megatron'
    check(ranks, data, schedule, job, than=than)


@pytest.mark.full
@supports('recompute passes: dropout with tensor parallelism', 'zb-h1')
def test_dropout_of_tensor_parallel_ranks(ranks, data):
    """Each tensor-parallel rank has states of its own, by name."""
    check(ranks, data, 'zb-h1', Job(te=False, tp=2, again='all', dropout=0.1))


@supports('recompute passes: optimizer steps that do not wait', '{schedule}')
@grid(schedule=('zb-h1',), dropout=(0.1,))
def test_forwards_run_ahead(ranks, data, schedule, dropout):
    """What is run ahead is run again; data and random states are those of then."""
    job = Job(te=False, again='all', dropout=dropout)
    check(ranks, data, f'{schedule}+post-validation', job)


@pytest.mark.te
@pytest.mark.full
@supports("recompute passes: {kind} layers of Transformer Engine's", '{schedule}')
@grid(
    kind=tuple(kind for kind in KINDS if kind != 'lengths'),
    schedule=('zb-v', 'interleaved'),
    fused=(True, True, False, False),
    bf16=(True, False),
    recompute=(None, 'selective'),
)
def test_te_layers(te_ranks, data, kind, schedule, fused, bf16, recompute):
    job = Job(kind, bf16=bf16, fused=fused, recompute=recompute, again='all')
    check(te_ranks, data, schedule, job)
