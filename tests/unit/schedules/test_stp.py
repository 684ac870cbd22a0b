"""STP: its published order, made one whose weight gradients come in microbatch order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grids import grid

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW, Together
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build, find

# chunk activations on each rank; what waits for W counts whole
PEAKS = {2: (7, 7), 4: (13, 13, 14, 15), 8: (25, 25, 26, 27, 28, 29, 30, 31)}


@grid(p=tuple(PEAKS), more=(-1, 0, 5))
def test_numbers(p, more):
    """The makespan is that of ZB-V; peaks are 3p+1 chunks on rank 0 to 4p-1 on the last."""
    m = 3 * p + more
    for together in (False, True):
        schedule = build('stp', p, m, together=together)
        check(schedule)
        costs = Costs.uniform(schedule.placement)
        assert simulate(schedule, costs).makespan == 3 * m + (p - 1) / 2
        assert peak(schedule, costs) == tuple(count / 2 for count in PEAKS[p])
    assert len(PEAKS[p]) == p and PEAKS[p][0] == 3 * p + 1 and PEAKS[p][-1] == 4 * p - 1


@grid(p=(2, 3, 5, 8), m=(1, 2, 5, 7, 13))
def test_any_number_of_microbatches(p, m):
    """It is the order of 3p-1 without the missing ones, with and without cells."""
    schedule = build('stp', p, m)
    check(schedule)
    check(build('stp', p, m, together=True))
    if m < 3 * p - 1:
        whole = build('stp', p, 3 * p - 1).passes
        assert schedule.passes == tuple(
            tuple(p for p in order if p.microbatch < m) for order in whole
        )


def test_pairs():
    """Of each kind as many as the steps say."""
    p, m = 4, 14
    schedule = build('stp', p, m, together=True)
    for rank in range(p):
        cells = [entry for entry in schedule.order(rank) if isinstance(entry, Together)]
        kinds = [''.join(sorted(one.kind for one in cell.passes)) for cell in cells]
        below, steady = p - 1 - rank, 2 * (m - 3 * p + 1) + 1 + 2 * rank
        assert kinds.count('FF') == (rank + 1) // 2
        assert kinds.count('FW') == below
        assert kinds.count('BWF') == steady - rank
        assert kinds.count('BF') == below + rank + 2 * p - 2 - rank
        assert all(len(cell.passes) == 2 for cell in cells)
        assert all(len({one.microbatch for one in cell.passes}) == 2 for cell in cells)


@pytest.mark.parametrize(
    ('halved', 'given'),
    [
        ('FB', {'together': 0.5, 'pairs': {'FF': 1.0, 'FW': 1.0}}),
        ('FF', {'pairs': {'FF': 0.5}}),
        ('FW', {'pairs': {'FW': 0.5}}),
    ],
)
def test_each_kind_of_pair_takes_its_own_time(halved, given):
    """So that overlap of tensor-parallel communication is simulated, kind by kind."""
    schedule = build('stp', 4, 12, together=True)
    plain = Costs.uniform(schedule.placement)
    timeline = simulate(schedule, replace(plain, **given))
    seen = set()
    for rank, at in schedule.together:
        pair = schedule.passes[rank][at : at + 2]
        kind = 'F' + pair[1].kind[0]
        (start, _), (_, end) = timeline.spans[rank][at : at + 2]
        alone = sum(1.0 if one.kind == BW else 0.5 for one in pair)
        assert end - start == (0.5 if kind == halved else 1.0) * alone
        seen.add(kind)
    assert seen == {'FB', 'FF', 'FW'}


def test_pairs_that_are_none():
    plain = Costs.uniform(build('stp', 2, 2).placement)
    with pytest.raises(ValueError, match='pairs has BB: give FF, FW or both'):
        replace(plain, pairs={'BB': 0.9})


def test_listed():
    family = find('stp')
    assert 'together' in family.options and '2510.27257' in family.source
