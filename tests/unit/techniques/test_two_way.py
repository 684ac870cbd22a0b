"""Two-way pipelines: any number of microbatches, symmetry, and what must not be."""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import figures
import pytest
from figures import span
from grids import grid
from orders import texts
from published import published

from megatron_zbpp import Costs, Pass, Placement, Schedule, build, check, simulate
from megatron_zbpp.analysis.checker import is_mirrored
from megatron_zbpp.analysis.deadlock import Collective, DeadlockError, prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.program import Instruction, Send
from megatron_zbpp.ir import F
from megatron_zbpp.render.html import html
from megatron_zbpp.render.scene import bars, colour, legend
from megatron_zbpp.schedules import find, own_families
from megatron_zbpp.techniques.two_way import unfolded

FAMILIES = {each.name: each for each in own_families(every=True) if each.num_routes > 1}
EQUAL = (1, 1, 1)
families = pytest.mark.parametrize('family', FAMILIES.values(), ids=lambda each: each.name)


@families
def test_any_number_of_microbatches(family):
    """It is valid, and mirrored where both ways have as many; GEMS never is, one way always."""
    assert is_mirrored(build('zb-v', 2, 4))
    for p, m in [*product((2, 4, 6, 8), range(1, 20)), (12, 7), (16, 1), (16, 33)]:
        schedule = build(family.name, p, m)
        check(schedule)
        assert schedule.num_microbatches == m
        assert not schedule.placement.is_one_way
        assert is_mirrored(schedule) == (m % 2 == 0 and family.name != 'gems'), (p, m)


def meeting_replicas(schedule: Schedule) -> list[list[Instruction | Collective]]:
    """Programs in which the ranks that hold a stage meet in each of its passes, and behind it."""
    held = [schedule.placement.stages(rank) for rank in range(schedule.num_ranks)]
    programs = []
    for own, program in zip(held, lower(schedule), strict=True):
        pair = tuple(rank for rank, stages in enumerate(held) if stages == own)
        counts: Counter[tuple[str, int]] = Counter()
        programs.append([])
        for each in program:
            around = [each]
            if isinstance(each, Pass):
                counts[each.kind, each.stage] += 1
                name = f'{each.kind} {counts[each.kind, each.stage]} of stage {each.stage}'
                around = [Collective(f'in {name}', pair), each, Collective(f'behind {name}', pair)]
            programs[-1] += around
    return programs


@families
@pytest.mark.parametrize('p', [4, 8])
def test_replicas_meet_in_passes(family, p):
    """Experts shared out over a pair, or its reductions: they end where the ways are mirrored."""
    never = pytest.raises(DeadlockError) if family.name == 'gems' else nullcontext()
    with never:
        prove(meeting_replicas(build(family.name, p, 2 * p)))


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
    assert simulate(both, times).makespan == span(half)
    assert max(peak(both, times)) == max(figures.held(half))
    assert [p._replace(microbatch=p.microbatch // 2) for p in both.passes[0]] == [*half.passes[0]]


def test_any_placement_goes_both_ways():
    wave = Placement.wave(4, 3).both_ways()
    assert wave.routes == (
        (0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3),
        (3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0),
    )
    assert [wave.route_of(i) for i in range(4)] == [0, 1, 0, 1]


def test_pictures_tell_the_ways_apart():
    schedule = build('chimera', 4, 8)
    timeline = figures.timeline(schedule)
    down, up = colour(F), colour(F, 1, 2)
    shown = {(bar.ran.microbatch % 2, bar.fill) for row in bars(timeline) for bar in row}
    assert {(0, down), (1, up)} == {each for each in shown if each[1] in (down, up)}
    shown = [text for text, _ in legend([schedule])]
    assert shown == ['F: forward, down', 'F, up', 'BW: whole backward, down', 'BW, up', 'idle']
    both = [text for text, _ in legend([schedule, build('1f1b', 4, 8)])]
    assert both[:2] == ['F: forward', 'F, up']
    assert '"route":[0,1]' in html({'chimera': timeline})


def test_costs_of_ranks_are_renamed_with_them():
    """Speeds and links stay with their ranks where Megatron's two replicas have other numbers."""
    schedule = build('chimera', 4, 8)
    ones = (1.0,) * 4
    edges = ((0, 1, 0.5), (2, 1, 0.25))
    costs = Costs.of(ones, ones, ones, comm=0.1, edges=edges, speeds=(1.0, 0.5, 2.0, 0.25))
    planned = replace(schedule, costs=costs)
    both = planned.over_replicas(schedule.placement.folded())
    assert both.costs is not None and both.costs.speeds != costs.speeds
    assert sorted(simulate(planned).spans) == sorted(simulate(both).spans)


# ---- Two-way pipelines: every cell of the tables of the papers and of our measurements, computed.


FUSED, UNEQUAL = (1, 0.5, 0.5), (1, 1.2, 0.8)  # fused: F takes as long as BW


def bubble(schedule: Schedule, times=EQUAL, **pairs) -> str:
    """Idle time of the makespan, and its share."""
    check(schedule)
    costs = replace(Costs.uniform(schedule.placement, *times), **pairs)
    makespan = simulate(schedule, costs).makespan
    work = schedule.num_microbatches * sum(times)
    if pairs:  # what passes that run as one save on the rank that has most of them
        most = max(Counter(rank for rank, _ in schedule.together).values())
        work += (pairs['together'] - 1) * most * sum(times)
    return cell(makespan - work, makespan)


def cell(idle: float, makespan: float) -> str:
    share = f'{idle / makespan:.3f}'.removeprefix('0')
    return f'{round(idle, 6):g} {share}'


def held(schedule: Schedule, unit: float = 1) -> str:
    found = [each / unit for each in figures.held(schedule)]
    return f'{min(found):g}..{max(found):g}'


CHIMERA = published(__file__, 'Chimera, table 3.2')


@pytest.mark.parametrize('row', CHIMERA, ids=lambda row: f'{row[0]}-{row[1]}')
def test_chimera(row):
    p, m, *expected = row
    whole, one_way = build('chimera', p, m), build('1f1b', p, m)
    twice = build('chimera-doubling', p, m)
    found = [bubble(whole, FUSED), bubble(whole), bubble(twice), held(whole), held(twice)]
    found.append(bubble(one_way))
    assert [own if cell else '' for own, cell in zip(found, expected, strict=True)] == expected
    assert messages(whole) == messages(one_way) == 2 * m * (p - 1)
    from_ends = [min(rank, p - 1 - rank) for rank in range(p)]
    assert m < p or figures.held(whole) == tuple(p // 2 + 1 + rank for rank in from_ends)


def messages(schedule: Schedule) -> int:
    return sum(isinstance(each, Send) for program in lower(schedule) for each in program)


@pytest.mark.parametrize(
    ('p', 'm', 'unequal', 'whole'),
    published(__file__, 'split backwards of Chimera, corrections 1.5'),
)
def test_split_backwards(p, m, unequal, whole):
    """The bubble no longer grows with m where F = B = W, in the same memory."""
    fused, parted = build('chimera', p, m), build('chimera-zb', p, m)
    assert texts(parted) == [re.sub(r'(\d+)BW(\d+)', r'\1B\2 \1W\2', own) for own in texts(fused)]
    idle = [float(bubble(parted, each).split()[0]) for each in (EQUAL, UNEQUAL)]
    assert idle == [p - 2, unequal]
    assert float(bubble(fused, UNEQUAL).split()[0]) == whole
    assert held(parted) == held(fused)


@pytest.mark.parametrize('row', published(__file__, 'GEMS, table 4'), ids=str)
def test_gems(row):
    p, *expected = row
    for m, (makespan, share) in zip((2, 8, 32), expected, strict=True):
        schedule = build('gems', p, m)
        assert makespan == 3 * p + (m - 1) * (2 * p + 1)
        assert bubble(schedule) == f'{makespan - 3 * m} {share}'
        fused = 2 * p + (m - 1) * (p + 1)
        assert bubble(schedule, FUSED) == cell(fused - 2 * m, fused)
        assert held(schedule) == '1..1'


@pytest.mark.parametrize('row', published(__file__, 'DualPipe, table 5.1'), ids=str)
def test_dualpipe(row):
    """Whatever m is; at p = 16 unequal times give more than 1.4 (p/2-1), by corrections 1.5."""
    p, *expected = row
    for m in (2 * p, 3 * p + 2):
        apart, paired = build('dualpipe', p, m), build('dualpipe', p, m, together=True)
        idle = [bubble(apart, each) for each in (EQUAL, UNEQUAL, (1, 1, 0.7))]
        idle += [bubble(paired), bubble(paired, together=2.5 / 3)]
        assert [float(each.split()[0]) for each in idle] == expected
        assert held(apart) == held(paired) == f'{p + 1}..{p + 1}'
        assert float(bubble(paired, UNEQUAL).split()[0]) < (p / 2 - 1) * (3 + 2 + 0.8 - 2.4)


@pytest.mark.parametrize('row', published(__file__, 'BitPipe, table 5.2'), ids=str)
def test_bitpipe(row):
    p, microbatches, fused, parted, chunks = row
    for times, line in ((FUSED, fused), (EQUAL, parted)):
        idle, shares = (part.split() for part in line.split(': '))
        for i, m in enumerate(microbatches):
            schedule = build('bitpipe', p, m)
            own, share = bubble(schedule, times).split()
            assert (float(own) * 2, share) == (float(idle[i % len(idle)]), shares[i])
            assert held(schedule, 0.5) == chunks
    for m in microbatches[:2]:
        schedule = build('bitpipe', p, m)
        assert messages(schedule) == 2 * m * (2 * p - 2)
        assert bubble(schedule, FUSED).split()[1] == cell(p - 2, 4 * m + p - 2).split()[1]
        assert float(bubble(schedule).split()[0]) * 2 == (m // p + 1) * (p - 2)


EQUAL_RANKS = {name: own for name, *own in published(__file__, 'on 8 ranks, corrections 1.5')}


@pytest.mark.parametrize('name', EQUAL_RANKS)
def test_at_equal_ranks_weights_and_batch(name):
    """Two ways, or two replicas of 4 ranks; in times of a pass of one of 8 stages."""
    *makespans, most = EQUAL_RANKS[name]
    ways = find(name).num_routes
    for batch, makespan in zip((8, 16), makespans, strict=True):
        schedule = build(name, 4 * ways, batch * ways // 2)
        found = figures.timeline(schedule, *[3 - ways] * 3)
        if makespan is not None:
            assert round(found.makespan, 6) == makespan
            assert makespan >= EQUAL_RANKS['zb-v'][batch // 8 - 1], 'none beats zb-v'
        if name == 'zb-v':
            assert max(found.windows) == {8: 27, 16: 48}[batch]
    assert max(figures.held(schedule)) * (3 - ways) == most
    assert ways * schedule.num_stages // schedule.num_ranks <= 4


@pytest.mark.parametrize('p', [2, 4, 8])
def test_dualpipe_is_dualpipe_v_twice(p):
    for m in (1, 3, 2 * p, 3 * p + 1):
        two, one = build('dualpipe', 2 * p, 2 * m), build('dualpipe-v', p, m)
        for times in (EQUAL, UNEQUAL):
            assert span(two, *times) == span(one, *(2 * each for each in times))
        assert max(figures.held(two)) == 2 * max(figures.held(one))
        held_twice = [one.placement.stages(min(rank, 2 * p - 1 - rank)) for rank in range(2 * p)]
        assert [two.placement.stages(rank) for rank in range(2 * p)] == held_twice
