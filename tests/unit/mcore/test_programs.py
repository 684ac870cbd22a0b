"""Programs by their sizes, made beside calls that vary, and those of one microbatch; wrappers."""

import threading
from itertools import product

import pytest
from orders import by_hand

from megatron_zbpp import Pass, Placement, build
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import (
    BY_TAKER,
    LATE,
    RECEIVES,
    Begin,
    Exchange,
    Hand,
    Join,
    Receive,
    Send,
)
from megatron_zbpp.analysis.run_ahead import evaluation
from megatron_zbpp.ir import B, F, W
from megatron_zbpp.mcore.lowered import ProgramCache, Size
from megatron_zbpp.mcore.model_settings import offloads_in_order
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.runtime.stage import Wrapper, folded, overridden
from megatron_zbpp.runtime.tables import one_microbatch
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed


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


# ---- When receives are posted, from the setting to the programs: ranks that differ are told.


@pytest.mark.parametrize('receives', RECEIVES)
def test_programs_are_those_that_were_asked_for(receives):
    found = Programs(Settings('zb-v', message_receives=receives)).lowered(4, 8, forward_only=False)
    assert found.programs == lower(found.schedule, receives)


def test_late_by_default_and_ranks_must_agree():
    keys = {
        receives: Programs(Settings('zb-v', message_receives=receives)).key for receives in RECEIVES
    }
    assert Programs(Settings('zb-v')).key == keys[LATE]
    assert len(set(keys.values())) == len(RECEIVES)
    # both kinds of programs are kept
    programs = Programs(Settings('zb-v'))
    late = programs.lowered(4, 8, forward_only=False)
    programs.varying = True
    found = programs.lowered(4, 8, forward_only=False)
    assert found.programs == lower(found.schedule, BY_TAKER) != late.programs
    evaluated = programs.lowered(4, 8, forward_only=True).schedule
    assert evaluated == evaluation(late.schedule)
    programs.varying = False
    assert programs.lowered(4, 8, forward_only=False) is late


# ---- Which schedules Megatron's own offloading of activations fits: by the order of backwards.


FITTING = (
    *('gpipe', '1f1b', '1f1b-pb', 'zb-h1', 'zb-h2'),
    *('interleaved', 'zb-interleaved', 'breadth-first', 'gis', 'gis-h', 'zeropp'),
)
OTHERS = ('zb-v', 'v-half', '1f1b-v', 'po', 'hanayo', 'dualpipe-v', 'bpipe', 'po-f')


@pytest.mark.parametrize('name', FITTING + OTHERS)
def test_by_name(name):
    assert offloads_in_order(build(name, 4, 12)) == (name in FITTING)


def test_more_chunks_and_microbatches_that_are_no_multiple():
    for chunks, microbatches in product((3, 4), (8, 10)):
        assert offloads_in_order(build('interleaved', 4, microbatches, num_chunks=chunks))
    moved = (move(build('1f1b', 4, 8), 'all') for move in (offloaded, recomputed))
    assert not any(map(offloads_in_order, moved))


@pytest.mark.parametrize(
    ('order', 'right'),
    [
        ('0F0 0F1 1F0 1F1 1BW0 1BW1 0BW0 0BW1', True),
        ('0F0 0F1 1F0 1BW0 1F1 1BW1 0BW0 0BW1', True),
        ('0F0 0F1 1F0 1F1 1BW0 0BW0 1BW1 0BW1', False),  # the last chunk's run back first
        ('0F0 1F0 1BW0 0BW0 0F1 1F1 1BW1 0BW1', True),
        ('0F0 0F1 1F0 1BW0 0BW0 1F1 1BW1 0BW1', False),  # 0F0 is not known to be next by then
        ('0F0 0F1 0BW1 0BW0', False),
    ],
)
def test_chunks_of_a_rank(order, right):
    placement = Placement.loop(1, 1 + ('1F0' in order))
    assert offloads_in_order(by_hand(placement, 2, order)) == right


def test_not_where_orders_change_or_forwards_are_taken_back():
    assert Programs(Settings('zb-h1')).in_order(4)
    assert not Programs(Settings('zb-h1', post_validation=True)).in_order(4)
    assert not Programs(Settings('auto', num_chunks=1)).in_order(4)


# ---- What a rank runs by itself: one microbatch of each stage, for which it waits for nobody.


CASES = {
    'zb-v': {}, '1f1b': {}, 'zb-interleaved': {}, 'chimera-zb': {}, 'dualpipe': {},
    'zb-h1, slices': {'slices': 2}, 'zb-v, offload': {'offload': 'all'},
    'zb-v, recompute': {'recompute': 'half'}, 'bpipe': {},
    'zb-v, vocabulary': {'vocab_parallel': 'output'},
}  # fmt: skip


@pytest.mark.parametrize('case', CASES)
def test_of_one_microbatch(case):
    programs = Programs(Settings(case.partition(',')[0], **CASES[case]))
    lowered = programs.lowered(4, 8, False)
    exchanges = []
    for rank, program in enumerate(lowered.programs):
        alone = one_microbatch(program)
        passes = [i for i in alone if isinstance(i, Pass)]
        held = lowered.placement.stages(rank)
        for stage in held:
            mine = [p for p in passes if p.stage == stage]
            assert len({p.microbatch for p in mine}) == 1
            whole = [
                p for p in program if isinstance(p, Pass) and p.microbatch == mine[0].microbatch
            ]
            kinds = [p.kind for p in whole if p.stage == stage and p.kind in (F, B, W, 'R', 'BW')]
            assert [p.kind for p in mine] == kinds
        came = {i.consumer for i in alone if isinstance(i, Receive | Hand)}
        taken = {i.consumer for i in program if isinstance(i, Receive | Hand)} & {*passes}
        assert taken <= came, 'a pass that takes a message gets one'
        seen = set()
        for i in alone:
            assert not isinstance(i, Begin | Join)
            if isinstance(i, Pass):
                seen.add(i)
            elif isinstance(i, Hand | Send):
                assert i.producer in seen, 'only what has been made here goes on'
        exchanges.append([i for i in alone if isinstance(i, Exchange)])
    assert all(each == exchanges[0] for each in exchanges), 'collectives have one order'
    assert bool(exchanges[0]) == ('vocabulary' in case)


# ---- Wrappers around a stage: methods that they have of their own, the first next to the stage.


class Adding(Wrapper):
    """Writes its name behind what comes from within."""

    def release(self, output, inner):
        return [*inner(output), self.stage]


def test_the_first_is_the_innermost():
    release = folded(
        [Adding('a'), Wrapper('none'), Adding('b')], 'release', lambda output: [output]
    )
    assert release('stage') == ['stage', 'a', 'b']

    def innermost(output):
        return output

    wrappers = [Wrapper('a'), Adding('b')]
    assert folded(wrappers, 'step', innermost) is innermost
    assert folded(wrappers[:1], 'release', innermost) is innermost
    assert overridden(wrappers, 'reads') == []
    assert [method.__self__ for method in overridden(wrappers, 'release')] == wrappers[1:]
