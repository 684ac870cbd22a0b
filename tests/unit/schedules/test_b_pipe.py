"""BPipe: both of a pair at the bound, with as few evictions as were derived."""

from __future__ import annotations

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build
from megatron_zbpp.schedules.b_pipe import b_pipe, bound, evicted

# p: evictions of each rank at m = p, 2p, 4p
EVICTIONS = {
    4: ((2, 0), (4, 0), (8, 0)),
    6: ((3, 2, 0), (6, 4, 0), (12, 8, 0)),
    8: ((4, 3, 2, 0), (8, 6, 4, 0), (16, 12, 8, 0)),
    10: ((5, 4, 3, 2, 0), (10, 8, 6, 4, 0), (20, 17, 13, 8, 0)),
    12: ((6, 5, 4, 3, 2, 0), (12, 10, 9, 6, 4, 0), (24, 21, 18, 13, 8, 0)),
    16: (
        (8, 7, 6, 5, 4, 3, 2, 0),
        (16, 14, 13, 11, 9, 7, 4, 0),
        (32, 29, 26, 23, 19, 14, 8, 0),
    ),
}


@pytest.mark.parametrize('p', EVICTIONS)
def test_evictions(p):
    for k, expected in zip((1, 2, 4), EVICTIONS[p], strict=True):
        assert tuple(len(evicted(p, k * p, rank)) for rank in range(p // 2)) == expected


@pytest.mark.parametrize('p', [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_both_of_a_pair_are_at_the_bound(p):
    """The partner is charged its own most, and the most that it ever stores."""
    for m in {1, p, 2 * p, 2 * p + 1}:
        schedule, plain = b_pipe(p, m), build('1f1b', p, m)
        check(schedule)
        costs = Costs.uniform(schedule.placement)
        held, stored = peak(schedule, costs), live(schedule, costs, 'partner')
        assert max(held) <= bound(p)
        for rank in range(p // 2):
            assert held[p - 1 - rank] + max(stored[rank], default=0) <= bound(p)
        assert simulate(schedule, costs).makespan == simulate(plain, costs).makespan
        passes = tuple(tuple(q for q in order if q.kind not in 'EK') for order in schedule.passes)
        assert passes == plain.passes
