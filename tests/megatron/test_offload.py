"""Activations on the host between F and B: as by Megatron's own schedule, to the bit."""

from __future__ import annotations

import pytest
from grids import grid
from models import KINDS, MICROBATCHES, Job, assert_same, check, reference, train
from supported import supports

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import FAMILIES, build, find
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.offload.place import offloaded, with_offload
from megatron_zbpp.techniques.recompute.place import with_recomputation

pytestmark = pytest.mark.shared

SCHEDULES = ('zb-v', 'interleaved', 'po', 'v-half')
SHAPES = {
    'tp 2': {'tp': 2},
    'overlap': {'dp': 2, 'overlap': True},
    'distributed': {'dp': 2, 'distributed': True},
    'ep 2': {'dp': 2, 'ep': 2, 'overlap': True, 'distributed': True},
}


@supports('activation offload: GPT', '{schedule}')
@grid(
    schedule=SCHEDULES,
    offload=('all', 'half', '1'),
    fused=(False, True),
    recompute=(None, 'full'),
)
def test_families(ranks, data, schedule, offload, fused, recompute):
    """W split from B and not, its products added to `main_grad` or by Megatron."""
    job = Job(te=False, offload=offload, fused=fused, recompute=recompute)
    check(ranks, data, schedule, job)


@pytest.mark.full
@supports('activation offload: GPT on {pp} ranks', '{schedule}')
@pytest.mark.parametrize('pp', [2, 4])
@pytest.mark.parametrize('schedule', [family.name for family in FAMILIES])
def test_every_family(ranks, data, schedule, pp):
    """Those that move activations by themselves as they are; whatever has the time leaves."""
    planned, amount = build(schedule, pp, MICROBATCHES), None
    if not find(schedule).moves:
        planned, amount = offloaded(planned, 'all'), 'all'
    moves = any(p.kind in 'OE' for _, p in planned)
    check(ranks, data, schedule, Job(te=False, pp=pp, offload=amount), moves=moves)


@supports('plans of order and actions: GPT', 'gis')
@pytest.mark.parametrize('fused', [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_plan_of_order_and_actions(ranks, data, tmp_path, fused):
    """From a file: some stages' activations leave, some are made again, some stay."""
    placement = Placement.loop(2, 2)
    costs = with_copies(Costs.uniform(placement), 0.5)
    base = build('gis', 2, MICROBATCHES)
    acting = with_offload(with_recomputation(base, [0], costs), [1], costs)
    assert {p.kind for _, p in acting} >= {'O', 'L', 'R'}
    file = tmp_path / 'plan.json'
    file.write_text(acting.to_json())
    check(ranks, data, 'gis', Job(te=False, fused=fused, file=str(file)), moves=True)


@supports('activation offload: GPT on 4 ranks', '{schedule}')
@grid(schedule=('1f1b', 'zb-h1'))
def test_four_ranks(ranks, data, schedule):
    check(ranks, data, schedule, Job(te=False, pp=4, offload='all'))


@pytest.mark.te
@supports('activation offload: {shape}', '{schedule}')
@grid(shape=tuple(SHAPES), schedule=('zb-v', 'interleaved'), fused=(True, True, False))
def test_shapes(te_ranks, data, shape, schedule, fused):
    """Sequence parallelism, gradients reduced while passes run, experts."""
    kind = 'experts' if shape == 'ep 2' else 'dense'
    job = Job(kind, offload='all', fused=fused, bf16=True, **SHAPES[shape])
    check(te_ranks, data, schedule, job)


@supports('activation offload: dropout, and an evaluation between', '{schedule}')
@grid(schedule=('zb-v', 'interleaved'), recompute=(None, 'full'))
def test_dropout(ranks, data, schedule, recompute):
    """As by the same schedule without: ranks draw in its order."""
    job = Job(te=False, offload='all', dropout=0.1, recompute=recompute)
    check(ranks, data, schedule, job, than=schedule)


@pytest.mark.te
@supports("activation offload: {kind} of Transformer Engine's", '{schedule}')
@grid(
    kind=tuple(kind for kind in KINDS if kind != 'lengths'),
    schedule=('zb-v', 'interleaved', 'po'),
    fused=(True, True, False, False),
    bf16=(True, False),
    recompute=(None, 'selective'),
)
def test_te_layers(te_ranks, data, kind, schedule, fused, bf16, recompute):
    job = Job(kind, bf16=bf16, fused=fused, recompute=recompute, offload='all')
    check(te_ranks, data, schedule, job)


@pytest.mark.te
@pytest.mark.full
@supports('activation offload: FP8 {fp8}', '{schedule}')
@grid(fp8=('weights', 'products'), schedule=('zb-v', 'interleaved'), fused=(True, False))
def test_fp8(te_ranks, data, fp8, schedule, fused):
    """Weights in FP8, and what is made of them for the backward, stay where they are."""
    job = Job(bf16=True, fp8=fp8, distributed=True, fused=fused, offload='all')
    check(te_ranks, data, schedule, job)


def measuring(job, argv, k):
    """As `train`; also what is said, and how many passes of each iteration have left.

    Args:
        job: to train.
        argv: of the example.
        k: as if that were measured, with passes that all take as long; None: what is measured.
    """
    from contextlib import ExitStack
    from unittest import mock

    from megatron_zbpp.guests import measurements, offload_tuner
    from megatron_zbpp.ir.costs import Costs
    from megatron_zbpp.mcore import session
    from megatron_zbpp.runtime.activations.store import ActivationStore

    said, left, ended = [], [], session.Session.on_iteration_end

    def noted(self, iteration):
        left.append(sum(p.kind == 'O' for _, p in iteration.schedule))
        ended(self, iteration)

    def equal(timeline):
        return Costs.uniform(timeline.schedule.placement)

    def slow(self):
        return dict.fromkeys(self.bytes, 1.5 * k / 2)  # of one of two chunks

    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(session.Session, 'on_iteration_end', noted))
        guest = offload_tuner.OffloadTuner(1, said.append)
        stack.enter_context(patch(offload_tuner, 'OffloadTuner', lambda _: guest))
        if k is not None:
            stack.enter_context(patch(measurements, 'measured_costs', equal))
            stack.enter_context(patch(ActivationStore, 'copy_times', slow))
        return train(job, argv), said, left


@supports('activation offload: as much as measured', '{schedule}')
@grid(schedule=('po', 'zb-v'), k=(3.0, None, 0.5), fused=(False, True))
def test_as_much_as_is_free(ranks, data, schedule, k, fused):
    """All of it goes while k is measured, then the share 1/k; all ranks switch together."""
    job = Job(te=False, offload='auto', fused=fused)
    found = ranks(2).run(measuring, job, job.argv(schedule, False, data), k)
    assert_same([trained for trained, _, _ in found], reference(ranks, data, job))
    (line,), (), left = found[0][1], found[1][1], found[0][2]
    assert all(each == left for _, _, each in found)
    assert left[0] == left[1] == left[2] > 0
    if k == 3:
        assert 'k = 3 measured: the share 1/k, 33%, that has the time goes' in line
        assert left[3] < left[0]
    elif k == 0.5:
        assert 'k = 0.5 measured: all that has the time goes to the host' in line
        assert left[3] >= left[0]
    else:
        assert line.startswith('offload auto: k = ') and 'activations of a full rank' in line
