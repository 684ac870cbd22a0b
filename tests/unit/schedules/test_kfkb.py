"""kFkB: k as messages and memory ask for it."""

from __future__ import annotations

from math import inf

import pytest
from grids import grid

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import F, Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.named_schedules import named
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.schedules import build


def costs(p: int, comm: float) -> Costs:
    return Costs.uniform(Placement.loop(p), comm=comm)


def size(schedule) -> int:
    """Return k: how many forwards the last rank runs before its first backward."""
    return next(at for at, p in enumerate(schedule.passes[-1]) if p.kind != F)


@pytest.mark.parametrize(('comm', 'k'), [(0, 1), (0.1, 2), (1.5, 2), (2, 4), (4.5, 4), (10, 8)])
def test_the_slower_the_messages_the_larger_the_groups(comm, k):
    """k is the least of 1, 2, 4, ... with 2c <= (k-1)(F+B+W): then messages count but once."""
    schedule = build('kfkb', 4, 24, costs=costs(4, comm))
    check(schedule)
    assert size(schedule) == k
    makespan = simulate(schedule, costs(4, comm)).makespan
    assert makespan == pytest.approx(3 * (24 + 3) + 2 * 3 * comm)


@pytest.mark.parametrize(('limit', 'k'), [(4, 1), (7.9, 1), (8, 2), (15, 2), (16, 4)])
def test_memory_limits_k(limit, k):
    slow = costs(4, 3)
    schedule = build('kfkb', 4, 24, costs=slow, memory_limit=limit)
    assert size(schedule) == k and max(peak(schedule, slow)) == 4 * k
    assert size(build('kfkb', 4, 24, memory_limit=limit)) == min(k, 2)


def test_less_memory_than_1f1b():
    """Ranks run fewer forwards ahead; one activation is the least."""
    for limit in (3, 1):
        schedule = build('kfkb', 4, 24, costs=costs(4, 3), memory_limit=limit)
        check(schedule)
        assert max(peak(schedule, costs(4, 3))) == limit
    with pytest.raises(ValueError, match=r'0\.5 does not hold one microbatch of rank 0'):
        build('kfkb', 4, 24, memory_limit=0.5)


@grid(p=(4, 2), m=(8, 3, 1))
def test_its_ends_are_1f1b_and_gpipe(p, m):
    assert build('kfkb', p, m, costs=costs(p, 0)).passes == build('1f1b', p, m).passes
    assert build('kfkb', p, 2).passes == build('gpipe', p, 2).passes


def test_plans_start_from_it_with_the_measured_messages():
    """So `auto` weighs it, with k by what it has measured, within the memory that there is."""
    placement = Placement.loop(4)
    for comm, limit, wins in ((1.5, inf, True), (1.5, 4, False), (0, inf, False)):
        found = named(Problem(placement, 16, costs(4, comm), (limit,) * 4))
        values = {each.name: each.value for each in found}
        assert (values['kfkb'] < values['1f1b'] - 10) is wins
