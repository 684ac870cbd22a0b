"""Two-way pipelines: any number of microbatches, symmetry, and what must not be."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from grids import grid

from megatron_zbpp.analysis.checker import check, is_mirrored
from megatron_zbpp.analysis.deadlock import Collective, DeadlockError, prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.program import Instruction
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import F, Pass, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import to_torch_csv
from megatron_zbpp.render.colours import colour, legend
from megatron_zbpp.render.html import html
from megatron_zbpp.render.scene import bars
from megatron_zbpp.schedules import Formula, Sizes, build, own_families
from megatron_zbpp.techniques.two_way.orders import unfolded

FAMILIES = {each.name: each for each in own_families(every=True) if each.num_routes > 1}
EQUAL = (1, 1, 1)
families = pytest.mark.parametrize('family', FAMILIES.values(), ids=lambda each: each.name)


@families
def test_any_number_of_microbatches(family):
    """It is valid, and mirrored where both ways have as many; GEMS never is."""
    for p, m in [*product((2, 4, 6, 8), range(1, 20)), (12, 7), (16, 1), (16, 33)]:
        schedule = build(family.name, p, m)
        check(schedule)
        assert schedule.num_microbatches == m
        assert not schedule.placement.is_one_way
        assert is_mirrored(schedule) == (m % 2 == 0 and family.name != 'gems'), (p, m)


def meeting_replicas(schedule: Schedule) -> list[list[Instruction | Collective]]:
    """Programs in which the ranks that hold a stage meet in each of its passes, and behind it."""
    where = schedule.placement
    held = [where.stages(rank) for rank in range(where.num_ranks)]
    programs = []
    for own, program in zip(held, lower(schedule), strict=True):
        pair = tuple(rank for rank, stages in enumerate(held) if stages == own)
        counts: Counter[tuple[str, int]] = Counter()
        programs.append([])
        for each in program:
            if not isinstance(each, Pass):
                programs[-1].append(each)
                continue
            counts[each.kind, each.stage] += 1
            name = f'{each.kind} {counts[each.kind, each.stage]} of stage {each.stage}'
            inside, behind = (Collective(f'{where} {name}', pair) for where in ('in', 'behind'))
            programs[-1] += inside, each, behind
    return programs


@families
@pytest.mark.parametrize('p', [4, 8])
def test_replicas_meet_in_passes(family, p):
    """Experts shared out over a pair, or its reductions: they end where the ways are mirrored."""
    schedule = build(family.name, p, 2 * p)
    if family.name == 'gems':
        with pytest.raises(DeadlockError):
            prove(meeting_replicas(schedule))
    else:
        prove(meeting_replicas(schedule))


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
