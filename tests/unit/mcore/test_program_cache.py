"""Programs by their sizes: within a bound of passes, and made beside calls that vary."""

from __future__ import annotations

import threading

import pytest

from megatron_zbpp.mcore.lowered import Size
from megatron_zbpp.mcore.program_cache import ProgramCache
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.schedules import build


class Counted:
    """Programs of zb-v on two ranks; notes which sizes are made, and by which thread."""

    def __init__(self, most_passes: int = 10**6) -> None:
        self.programs = Programs(Settings('zb-v'))
        self.cache = ProgramCache(self.make, most_passes)
        self.programs.cache = self.cache
        self.made: list[tuple[int, bool]] = []

    def make(self, size: Size):
        beside = threading.current_thread() is not threading.main_thread()
        self.made.append((size.num_microbatches, beside))
        return self.programs._make(size)

    def call(self, m: int, forward_only: bool = False):
        found = self.programs.lowered(2, m, forward_only)
        if self.cache.ahead is not None:
            self.cache.ahead.wait()
        return found

    def has(self, m: int, forward_only: bool = False) -> bool:
        return Size(2, m, forward_only, False) in self.cache


def test_sizes_that_vary_are_made_beside():
    """From the third call on, all between the least and the most; no call then waits."""
    counted = Counted()
    for m in (4, 9, 5):
        counted.call(m)
    assert [beside for _, beside in counted.made[:3]] == [False] * 3
    assert sorted(m for m, _ in counted.made) == [4, 5, 6, 7, 8, 9]
    assert all(beside for m, beside in counted.made if m in (6, 7, 8))
    before = list(counted.made)
    for m in (6, 8, 7, 4):
        assert counted.call(m).schedule == counted.programs.schedule(2, m)
    assert counted.made == before


@pytest.mark.parametrize('counts', [(8,) * 20, (4,) * 12 + (8,) * 12 + (16,) * 12])
def test_the_same_batches_and_growing_ones_start_no_thread(counts):
    counted = Counted()
    for m in counts:
        counted.call(m)
    assert counted.cache.ahead is None and len(counted.made) == len(set(counts))


def test_forward_only_passes_vary_on_their_own():
    counted = Counted()
    for m in (3, 6, 3):
        counted.call(8)
        counted.call(m, forward_only=True)
    assert counted.has(4, forward_only=True) and counted.has(5, forward_only=True)
    assert not counted.has(4) and not counted.has(7)


def test_the_least_recently_used_go_beyond_the_bound():
    """Each microbatch has 2 ranks x 2 chunks x F, B and W = 12 passes."""
    counted = Counted(12 * 20)
    for m in (5, 9, *[4] * 12):
        counted.call(m)
    counted.cache.ahead = None
    assert [counted.has(m) for m in (5, 9, 4)] == [True, True, True]
    assert counted.cache.num_passes == 12 * 18
    counted.cache._changes.clear()
    counted.call(5)
    counted.call(6)
    assert [counted.has(m) for m in (5, 9, 4, 6)] == [True, False, True, True]
    counted.cache._changes.clear()
    counted.call(100)
    assert counted.has(100) and not counted.has(6), 'the latest is kept, whatever its size'


def test_what_is_made_beside_keeps_to_the_bound():
    counted = Counted(12 * 40)
    for m in (4, 12, 5):
        counted.call(m)
    assert [counted.has(m) for m in (4, 12, 5)] == [True] * 3
    assert counted.has(6) and counted.has(7) and not counted.has(8), '13 fit beside 21, 21 do not'
    assert counted.cache.num_passes <= 12 * 40


def test_a_size_that_cannot_be_made_is_refused_by_its_call_alone():
    """The thread leaves it out."""
    counted = Counted()
    whole = counted.make

    def make(size: Size):
        if size.num_microbatches == 5:
            raise ValueError('5 microbatches are none')
        return whole(size)

    counted.cache.make = make
    for m in (4, 7, 4):
        counted.call(m)
    assert counted.has(6) and not counted.has(5)
    with pytest.raises(ValueError, match='5 microbatches are none'):
        counted.call(5)


def test_a_plan_replaces_what_is_kept_for_its_size():
    counted = Counted()
    for m in (4, 7, 4):
        counted.call(m)
    planned = build('1f1b-v', 2, 5).reversed()
    counted.programs.replace(planned)
    assert counted.has(6) and not counted.has(5)
    assert counted.call(5).schedule == planned
