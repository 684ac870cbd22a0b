"""Slices that run again, or are elsewhere meanwhile: what is placed, and what that leaves."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.offload.place import offloaded
from megatron_zbpp.techniques.recompute.place import recomputed
from megatron_zbpp.techniques.slices.place import in_slices


def held(schedule: Schedule) -> float:
    return max(peak(schedule, Costs.uniform(schedule.placement)))


@pytest.mark.parametrize('name', ['gpipe', 'po', 'zb-v'])
def test_copies_of_slices_take_an_nth(name):
    """So all but the latest leave, where whole sequences in the same slots would not."""
    whole = in_slices(name, 4, 4, 4)
    gone = offloaded(whole, 'all', ratio=0.5)
    check(gone)
    count = Counter(p.kind for _, p in gone)
    assert count['O'] == count['L'] >= 0.9 * count['F']
    assert held(gone) < 0.8 * held(whole)


def test_a_share_is_of_slices():
    """Where k is 2, every second slice leaves, not all slices of every second microbatch."""
    schedule = in_slices('gpipe', 2, 8, 4)
    gone = offloaded(schedule, 'auto', ratio=2.0)
    assert {p.slice % 2 for _, p in gone if p.kind == 'O'} == {1}
    assert len({p.microbatch for _, p in gone if p.kind == 'O'}) > 4


@pytest.mark.parametrize('name', ['1f1b', 'gpipe', 'interleaved'])
def test_slices_that_run_again_are_held_one_at_a_time(name):
    whole = in_slices(name, 4, 4, 4)
    again = recomputed(whole, 'all')
    check(again)
    assert held(again) == pytest.approx(1 / 4 / whole.placement.num_chunks)
