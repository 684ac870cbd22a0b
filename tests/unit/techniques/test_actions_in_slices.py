"""Slices that run again, or are elsewhere meanwhile: what is placed, and what that leaves."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.offload import place
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


def test_long_slices_are_copied_and_run_again_for_longer():
    """Slots are of the longest; R takes as long as its F, copies as long as their bytes do."""
    schedule = in_slices('gpipe', 2, 2, 2)
    uneven = [(0.75, 0.25)] * 2
    costs = with_copies(Costs.uniform(schedule.placement), 0.5)
    costs = costs.with_parts(F=uneven, B=uneven, W=uneven, activation=uneven, retained=uneven)
    for made in (recomputed(schedule, 'all', costs), offloaded(schedule, 'all', costs)):
        for p, (start, end) in simulate(made, costs).by_pass.items():
            long = {'R': 0.75, 'O': 0.5625, 'L': 0.5625}.get(p.kind)
            assert long is None or end - start == pytest.approx(long / (3 if p.slice else 1))
    with patch.object(place, 'with_transfers') as placed:
        place.with_offload(schedule, [0], costs)
    length, margin = placed.call_args.args[3:5]
    assert (length, margin) == (0.5625, 0.75)
