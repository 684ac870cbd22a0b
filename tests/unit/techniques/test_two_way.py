"""Two-way pipelines: numbers of the papers' tables, symmetry, and what must not be."""

from __future__ import annotations

from itertools import product

import pytest
from grids import grid

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.mirrored import is_mirrored
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import F, Pass, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import to_torch_csv
from megatron_zbpp.render.colours import colour, legend
from megatron_zbpp.render.html import html
from megatron_zbpp.render.scene import bars
from megatron_zbpp.schedules import Formula, Sizes, build, own_families
from megatron_zbpp.techniques.two_way.unfold import unfolded

FAMILIES = {each.name: each for each in own_families(every=True) if each.num_routes > 1}
EQUAL, FUSED = (1, 1, 1), (1, 0.5, 0.5)  # F = B = W; a backward takes as long as a forward
families = pytest.mark.parametrize('family', FAMILIES.values(), ids=lambda each: each.name)


def facts(name: str, p: int, m: int, times=EQUAL, **options) -> tuple[float, float, float]:
    """Idle time of the makespan, and the least and the most that a rank holds."""
    schedule = build(name, p, m, **options)
    check(schedule)
    costs = Costs.uniform(schedule.placement, *times)
    held = peak(schedule, costs)
    idle = simulate(schedule, costs).makespan - m * sum(times)
    return tuple(round(each, 6) for each in (idle, min(held), max(held)))


# p and m: bubble where F = BW, where BW = 2F, of doubling where BW = 2F, peaks, and of doubling
CHIMERA = {
    (4, 2): (4, 6, None, (2, 2), None),
    (4, 4): (2, 4, None, (3, 4), None),
    (4, 8): (2, 6, 3, (3, 4), (7, 8)),
    (4, 16): (2, 10, 3, (3, 4), (7, 8)),
    (8, 4): (10, 16, None, (3, 4), None),
    (8, 8): (6, 12, None, (5, 8), None),
    (8, 16): (6, 18, 9, (5, 8), (13, 16)),
    (8, 32): (6, 30, 9, (5, 8), (13, 16)),
    (16, 16): (14, 28, None, (9, 16), None),
    (16, 32): (14, 42, 21, (9, 16), (25, 32)),
    (16, 64): (14, 70, 21, (9, 16), (25, 32)),
}


@pytest.mark.parametrize('sizes', CHIMERA, ids=str)
def test_chimera(sizes):
    fused, split, doubling, held, doubled = CHIMERA[sizes]
    assert facts('chimera', *sizes, FUSED) == (fused, *held)
    assert facts('chimera', *sizes) == (split, *held)
    if doubling is not None:
        assert facts('chimera-doubling', *sizes) == (doubling, *doubled)


def test_profile_of_chimera():
    schedule = build('chimera', 8, 16)
    assert peak(schedule, Costs.uniform(schedule.placement)) == (5, 6, 7, 8, 8, 7, 6, 5)


def test_split_backwards_keep_the_bubble_of_chimera():
    """As if F took the time of BW, whatever m is, in the same memory."""
    unequal = {(8, 8): 7.2, (8, 16): 8.4, (8, 32): 10.8, (4, 4): 2.4, (4, 8): 2.8, (4, 16): 3.6}
    for (p, m), bubble in unequal.items():
        *_, held = CHIMERA[p, m][:4]
        assert facts('chimera-zb', p, m) == (p - 2, *held)
        assert facts('chimera-zb', p, m, (1, 1.2, 0.8)) == (bubble, *held)


def test_gems():
    table = {
        2: {2: 11, 8: 41, 32: 161},
        4: {2: 21, 8: 75, 32: 291},
        8: {2: 41, 8: 143, 32: 551},
        16: {2: 81, 8: 279, 32: 1071},
    }
    for p, row in table.items():
        for m, makespan in row.items():
            assert facts('gems', p, m) == (makespan - 3 * m, 1, 1)
            assert facts('gems', p, m, FUSED)[0] == 2 * p + (m - 1) * (p + 1) - 2 * m


@pytest.mark.parametrize('p', [4, 8, 16])
def test_dualpipe(p):
    for m in (2 * p, 3 * p + 2):
        whole = p // 2 - 1
        assert facts('dualpipe', p, m) == (whole, p + 1, p + 1)
        assert facts('dualpipe', p, m, (1, 1, 0.7))[0] == round(1.3 * whole, 6)
        unequal = 10.2 if p == 16 else round(1.4 * whole, 6)
        assert facts('dualpipe', p, m, (1, 1.2, 0.8))[0] == unequal
        assert facts('dualpipe', p, m, together=True) == (p - 2, p + 1, p + 1)


def test_bitpipe():
    """In chunks, of which a full rank has two: bubbles where F = BW, where BW = 2F, and peaks."""
    table = {
        4: ((4, 8, 16), 2, (4, 6, 10), (7, 8)),
        6: ((6, 12, 24), 4, (8, 12, 20), (10, 12)),
        8: ((8, 16, 32), 6, (12, 18, 30), (13, 16)),
        16: ((16, 32, 64), 14, (28, 42, 70), (25, 32)),
    }
    for p, (microbatches, fused, split, held) in table.items():
        for m, bubble in zip(microbatches, split, strict=True):
            chunks = tuple(each / 2 for each in held)
            assert facts('bitpipe', p, m) == (bubble / 2, *chunks)
            assert facts('bitpipe', p, m, FUSED) == (fused / 2, *chunks)


def test_at_equal_ranks_weights_and_batch():
    """On 8 ranks, in times of one of 8 stages; one way: two replicas of 4 ranks, half the batch."""
    table = {
        'zb-v': (27, 51, 8),
        'dualpipe': (None, 51, 9),
        'bitpipe': (30, 57, 8),
        'interleaved': (33, 57, 11),
        'chimera': (36, 66, 8),
        '1f1b-v': (39, 63, 6),
        'chimera-doubling': (39, 57, 16),
        '1f1b': (42, 66, 8),
        'gems': (143, 279, 1),
    }
    for name, (few, many, held) in table.items():
        ways = FAMILIES[name].num_routes if name in FAMILIES else 1
        for batch, makespan in ((8, few), (16, many)):
            schedule = build(name, 4 * ways, batch * ways // 2)
            times = [3 - ways] * 3  # of a full rank
            costs = Costs.uniform(schedule.placement, *times)
            if makespan is not None:
                assert round(simulate(schedule, costs).makespan, 6) == makespan, name
        assert max(peak(schedule, costs)) * (3 - ways) == held, name


@families
def test_any_number_of_microbatches(family):
    """It is valid, and mirrored where both ways have as many; GEMS never is."""
    for p, m in product((2, 4, 6, 8), range(1, 20)):
        schedule = build(family.name, p, m)
        check(schedule)
        assert schedule.num_microbatches == m
        assert not schedule.placement.is_one_way
        assert is_mirrored(schedule) == (m % 2 == 0 and family.name != 'gems'), (p, m)


def test_one_way_is_mirrored():
    assert is_mirrored(build('zb-v', 2, 4))


@families
def test_formulas(family):
    promised = 0
    for p, m, times in product((2, 4, 6, 8), range(1, 33), (EQUAL, (1, 1.2, 0.8), (4, 4, 3))):
        sizes = Sizes(p, m, 1, *times)
        if not (family.bubble.where(sizes) or family.memory.where(sizes)):
            continue
        schedule = build(family.name, p, m)
        costs = Costs.uniform(schedule.placement, *times)
        if family.memory.where(sizes):
            assert agrees(family.memory, sizes, max(peak(schedule, costs))), sizes
        if family.bubble.where(sizes):
            promised += 1
            window = max(simulate(schedule, costs).windows) - m * sum(times)
            assert agrees(family.bubble, sizes, window), sizes
    assert promised > 5


def agrees(formula: Formula, sizes: Sizes, found: float) -> bool:
    promised = formula(sizes)
    return found <= promised + 1e-5 if formula.at_most else found == pytest.approx(promised)


@grid(name=('zb-v', '1f1b-v', 'v-half', 'dualpipe-v'), shape=((1, 3), (2, 5), (4, 9)))
def test_any_schedule_of_a_v_unfolds(name, shape):
    """It runs as long, and each rank holds as much; and folds into the same passes."""
    p, m = shape
    if p == 1 and name != '1f1b-v':
        p = 2
    half = build(name, p, m)
    both = unfolded('both', half, 2 * m)
    check(both)
    assert is_mirrored(both)
    times = Costs.uniform(half.placement)
    assert simulate(both, times).makespan == simulate(half, times).makespan
    assert max(peak(both, times)) == max(peak(half, times))
    assert [p._replace(microbatch=p.microbatch // 2) for p in both.passes[0]] == [*half.passes[0]]


def test_what_is_no_v_does_not_unfold():
    with pytest.raises(ValueError, match='zb-h1 cannot be unfolded because its stages are not in'):
        unfolded('both', build('zb-h1', 2, 4), 8)


@families
def test_odd_ranks(family):
    with pytest.raises(ValueError, match=r'^3 ranks cannot run both ways .*: give an even number'):
        build(family.name, 3, 4)


def test_any_placement_goes_both_ways():
    wave = Placement.wave(4, 3).both_ways()
    assert wave.routes == (
        (0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3),
        (3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0),
    )
    assert [wave.route_of(i) for i in range(4)] == [0, 1, 0, 1]


def test_pictures_tell_the_ways_apart():
    schedule = build('chimera', 4, 8)
    timeline = simulate(schedule, Costs.uniform(schedule.placement))
    down, up = colour(F), colour(F, 1, 2)
    shown = {(bar.ran.microbatch % 2, bar.fill) for row in bars(timeline) for bar in row}
    assert {(0, down), (1, up)} == {each for each in shown if each[1] in (down, up)}
    assert [text for text, _ in legend([schedule])] == [
        'F: forward, down',
        'F, up',
        'BW: whole backward, down',
        'BW, up',
        'idle',
    ]
    both = [text for text, _ in legend([schedule, build('1f1b', 4, 8)])]
    assert both[:2] == ['F: forward', 'F, up']
    assert '"route":[0,1]' in html({'chimera': timeline})


def test_the_csv_of_torch_has_one_way():
    with pytest.raises(ValueError, match=r'chimera cannot be written as the CSV of torch.*: write'):
        to_torch_csv(build('chimera', 2, 4))


def test_json_goes_there_and_back():
    for name in FAMILIES:
        schedule = build(name, 4, 7)
        assert Schedule.from_json(schedule.to_json()) == schedule
        assert isinstance(schedule.passes[0][0], Pass)
