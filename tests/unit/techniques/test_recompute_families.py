"""Merak and Varuna: the last rank runs no forward again, and R comes before its gradient does."""

from __future__ import annotations

import pytest
from grids import grid

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import R
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.recompute.place import recomputed

names = pytest.mark.parametrize('name', ['merak', 'varuna'])


@names
@grid(p=(4, 2, 7), m=(12, 3))
def test_all_ranks_but_the_last_run_forwards_again(name, p, m):
    for rank, order in enumerate(build(name, p, m).passes):
        again = [each.microbatch for each in order if each.kind == R]
        assert again == ([] if rank == p - 1 else list(range(m)))


@names
def test_r_ends_when_the_gradient_arrives(name):
    """On the rank before the last, whose first gradient is there after F of two ranks and a BW."""
    schedule = build(name, 4, 8)
    spans = simulate(schedule, Costs.uniform(schedule.placement)).spans[2]
    ran = dict(zip(map(str, schedule.passes[2]), spans, strict=True))
    assert ran['2R0'] == (5, 6) and ran['2BW0'] == (6, 8)


def test_costs_move_r():
    """With messages of a half the gradient comes one later, and so does R."""
    costs = Costs.uniform(build('varuna', 4, 8).placement, comm=0.5)
    schedule = build('varuna', 4, 8, costs=costs)
    assert schedule.passes != build('varuna', 4, 8).passes
    ran = dict(zip(map(str, schedule.passes[2]), simulate(schedule, costs).spans[2], strict=True))
    assert ran['2R0'] == (7, 8) and ran['2BW0'] == (8, 10)


@grid(p=(4, 8), more=(0, 5, 12))
def test_merak_is_shorter_than_1f1b_that_recomputes(p, more):
    """By one F: the critical path is one rank shorter, and R is out of the way."""
    m, plain = 2 * p + more, build('1f1b', p, 2 * p + more)
    costs = Costs.uniform(plain.placement)
    others = simulate(recomputed(plain, 'all'), costs).makespan
    assert simulate(build('merak', p, m), costs).makespan == others - 1
    assert others - 1 == 4 * m + 3 * (p - 2)


def test_varuna_runs_forwards_where_1f1b_waits():
    """Rank 0 has all forwards behind it before its first backward; 1F1B has p of them."""
    order = [p.kind for p in build('varuna', 4, 8).passes[0]]
    assert order.index(R) == 8
    assert [p.kind for p in build('1f1b', 4, 8).passes[0]].index(BW) == 4
