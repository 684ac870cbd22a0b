"""Two-way pipelines: every cell of the tables of the papers and of our measurements, computed.

A cell such as '6 .273' is a bubble, in forwards of a full rank, and its share of the makespan; one
such as '5..8' the least and the most activations that a rank holds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.program import Send
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW, B, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build, find

EQUAL, FUSED, UNEQUAL = (1, 1, 1), (1, 0.5, 0.5), (1, 1.2, 0.8)  # fused: F takes as long as BW


def bubble(schedule: Schedule, times=EQUAL, **pairs) -> str:
    """Idle time of the makespan, and its share."""
    check(schedule)
    costs = replace(Costs.uniform(schedule.placement, *times), **pairs)
    makespan = simulate(schedule, costs).makespan
    work = schedule.num_microbatches * sum(times)
    if pairs:
        work += (pairs['together'] - 1) * max(paired(schedule, sum(times)))
    return cell(makespan - work, makespan)


def paired(schedule: Schedule, each: float) -> list[float]:
    """By rank: what its passes that run as one take, one after the other."""
    found = [0.0] * schedule.num_ranks
    for rank, _ in schedule.together:
        found[rank] += each
    return found


def cell(idle: float, makespan: float) -> str:
    share = f'{idle / makespan:.3f}'.removeprefix('0')
    return f'{round(idle, 6):g} {share}'


def held(schedule: Schedule, unit: float = 1) -> str:
    found = [each / unit for each in peak(schedule, Costs.uniform(schedule.placement))]
    return f'{min(found):g}..{max(found):g}'


def split(schedule: Schedule) -> Schedule:
    """Each BW as B and W in its place."""
    orders = [
        [
            part
            for p in order
            for part in ((p._replace(kind=B), p._replace(kind=W)) if p.kind == BW else (p,))
        ]
        for order in schedule.passes
    ]
    return Schedule.of('split', schedule.placement, schedule.num_microbatches, orders)


# table 3.2. p, m: where F = BW, where BW = 2F, of doubling, peaks, of doubling, bubble of 1F1B
CHIMERA = [
    (4, 2, '4 .500', '6 .500', '', '2..2', '', ''),
    (4, 4, '2 .200', '4 .250', '', '3..4', '', '9 .429'),
    (4, 8, '2 .111', '6 .200', '3 .111', '3..4', '7..8', '9 .273'),
    (4, 16, '2 .059', '10 .172', '3 .059', '3..4', '7..8', '9 .158'),
    (8, 4, '10 .556', '16 .571', '', '3..4', '', ''),
    (8, 8, '6 .273', '12 .333', '', '5..8', '', '21 .467'),
    (8, 16, '6 .158', '18 .273', '9 .158', '5..8', '13..16', '21 .304'),
    (8, 32, '6 .086', '30 .238', '9 .086', '5..8', '13..16', '21 .179'),
    (16, 16, '14 .304', '28 .368', '', '9..16', '', '45 .484'),
    (16, 32, '14 .179', '42 .304', '21 .179', '9..16', '25..32', '45 .319'),
    (16, 64, '14 .099', '70 .267', '21 .099', '9..16', '25..32', '45 .190'),
]


@pytest.mark.parametrize('row', CHIMERA, ids=lambda row: f'{row[0]}-{row[1]}')
def test_chimera(row):
    p, m, *expected = row
    whole, one_way = build('chimera', p, m), build('1f1b', p, m)
    twice = build('chimera-doubling', p, m)
    found = [bubble(whole, FUSED), bubble(whole), bubble(twice), held(whole), held(twice)]
    found.append(bubble(one_way))
    assert [own if cell else '' for own, cell in zip(found, expected, strict=True)] == expected
    assert messages(whole) == messages(one_way) == 2 * m * (p - 1)


def messages(schedule: Schedule) -> int:
    return sum(isinstance(each, Send) for program in lower(schedule) for each in program)


@pytest.mark.parametrize(('p', 'm'), [row[:2] for row in CHIMERA])
def test_formulas_of_chimera(p, m):
    """Shares of the makespan, as its authors give them; and that of fewer microbatches."""
    whole = build('chimera', p, m)
    if m < p:
        assert bubble(whole, FUSED) == cell(2 * p - m - 2, m * 2 + 2 * p - m - 2)
        return
    assert float(bubble(whole, FUSED).split()[1]) == round((p - 2) / (2 * m + p - 2), 3)
    idle = (m // p + 1) * (p - 2)
    assert bubble(whole) == cell(idle, 3 * m + idle)
    assert held(whole) == f'{p // 2 + 1}..{p}'
    assert held(build('chimera-doubling', p, 2 * p)) == f'{3 * p // 2 + 1}..{2 * p}'


def test_profile_of_chimera():
    schedule = build('chimera', 8, 16)
    assert peak(schedule, Costs.uniform(schedule.placement)) == (5, 6, 7, 8, 8, 7, 6, 5)


# corrections 1.5. p, m: where F, B, W take 1, 1.2, .8; whole
SPLIT = [
    (8, 8, 7.2, 12),
    (8, 16, 8.4, 18),
    (8, 32, 10.8, 30),
    (4, 4, 2.4, 4),
    (4, 8, 2.8, 6),
    (4, 16, 3.6, 10),
]


@pytest.mark.parametrize(('p', 'm', 'unequal', 'whole'), SPLIT)
def test_split_backwards(p, m, unequal, whole):
    """The bubble no longer grows with m where F = B = W, in the same memory."""
    fused, parted = build('chimera', p, m), build('chimera-zb', p, m)
    assert parted.passes == split(fused).passes
    idle = [float(bubble(parted, each).split()[0]) for each in (EQUAL, UNEQUAL)]
    assert idle == [p - 2, unequal]
    assert float(bubble(fused, UNEQUAL).split()[0]) == whole
    assert held(parted) == held(fused)


def test_split_doubling():
    for m in (16, 32):
        parted = split(build('chimera-doubling', 8, m))
        assert bubble(parted).startswith('6 ')
        assert held(parted) == '13..16'


# table 4. p: of m = 2, 8, 32 the makespan where BW = 2F, and the share of its bubble
GEMS = {
    2: ((11, '.455'), (41, '.415'), (161, '.404')),
    4: ((21, '.714'), (75, '.680'), (291, '.670')),
    8: ((41, '.854'), (143, '.832'), (551, '.826')),
    16: ((81, '.926'), (279, '.914'), (1071, '.910')),
}


@pytest.mark.parametrize('p', GEMS)
def test_gems(p):
    for m, (makespan, share) in zip((2, 8, 32), GEMS[p], strict=True):
        schedule = build('gems', p, m)
        assert makespan == 3 * p + (m - 1) * (2 * p + 1)
        assert bubble(schedule) == f'{makespan - 3 * m} {share}'
        fused = 2 * p + (m - 1) * (p + 1)
        assert bubble(schedule, FUSED) == cell(fused - 2 * m, fused)
        assert held(schedule) == '1..1'


# table 5.1. p: bubble where F = B = W, at 1, 1.2, .8 and at 1, 1, .7; pairs in 3 and in 2.5 of F
DUALPIPE = {4: (1, 1.4, 1.3, 2, 1.5), 8: (3, 4.2, 3.9, 6, 4.5), 16: (7, 10.2, 9.1, 14, 10.5)}


@pytest.mark.parametrize('p', DUALPIPE)
def test_dualpipe(p):
    """Whatever m is; at p = 16 unequal times give more than 1.4 (p/2-1), by corrections 1.5."""
    for m in (2 * p, 3 * p + 2):
        apart, paired = build('dualpipe', p, m), build('dualpipe', p, m, together=True)
        idle = [bubble(apart, each) for each in (EQUAL, UNEQUAL, (1, 1, 0.7))]
        idle += [bubble(paired), bubble(paired, together=2.5 / 3)]
        assert tuple(float(each.split()[0]) for each in idle) == DUALPIPE[p]
        assert held(apart) == held(paired) == f'{p + 1}..{p + 1}'
        assert float(bubble(paired, UNEQUAL).split()[0]) < (p / 2 - 1) * (3 + 2 + 0.8 - 2.4)


# table 5.2. p: microbatches; in chunks the bubble where F = BW; where BW = 2F; peaks
BITPIPE = {
    4: ((4, 8, 16), '2: .111 .059 .030', '4 6 10: .143 .111 .094', '7..8'),
    6: ((6, 12, 24), '4: .143 .077 .040', '8 12 20: .182 .143 .122', '10..12'),
    8: ((8, 16, 32), '6: .158 .086 .045', '12 18 30: .200 .158 .135', '13..16'),
    16: ((16, 32, 64), '14: .179 .099 .052', '28 42 70: .226 .179 .154', '25..32'),
}


@pytest.mark.parametrize('p', BITPIPE)
def test_bitpipe(p):
    microbatches, fused, parted, chunks = BITPIPE[p]
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


# corrections 1.5, on 8 ranks: times of iterations with 8 and 16 microbatches, and peak at 16
AT_EQUAL_RANKS = {
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


def on_eight_ranks(name: str, batch: int) -> tuple[Schedule, Costs]:
    """Two ways, or two replicas of 4 ranks; in times of a pass of one of 8 stages."""
    ways = find(name).num_routes
    schedule = build(name, 4 * ways, batch * ways // 2)
    return schedule, Costs.uniform(schedule.placement, *[3 - ways] * 3)


@pytest.mark.parametrize('name', AT_EQUAL_RANKS)
def test_at_equal_ranks_weights_and_batch(name):
    *makespans, most = AT_EQUAL_RANKS[name]
    for batch, makespan in zip((8, 16), makespans, strict=True):
        schedule, costs = on_eight_ranks(name, batch)
        found = simulate(schedule, costs)
        if makespan is not None:
            assert round(found.makespan, 6) == makespan
            assert makespan >= AT_EQUAL_RANKS['zb-v'][batch // 8 - 1], 'none beats zb-v'
        if name == 'zb-v':
            assert max(found.windows) == {8: 27, 16: 48}[batch]
    assert max(peak(schedule, costs)) * (3 - find(name).num_routes) == most
    assert find(name).num_routes * schedule.num_stages // schedule.num_ranks <= 4


@pytest.mark.parametrize('p', [2, 4, 8])
def test_dualpipe_is_dualpipe_v_twice(p):
    for m in (1, 3, 2 * p, 3 * p + 1):
        two, one = build('dualpipe', 2 * p, 2 * m), build('dualpipe-v', p, m)
        for times in (EQUAL, UNEQUAL):
            of_two = Costs.uniform(two.placement, *times)
            of_one = Costs.uniform(one.placement, *(2 * each for each in times))
            assert simulate(two, of_two).makespan == simulate(one, of_one).makespan
        assert max(peak(two, of_two)) == 2 * max(peak(one, of_one))
        held_twice = [one.placement.stages(min(rank, 2 * p - 1 - rank)) for rank in range(2 * p)]
        assert [two.placement.stages(rank) for rank in range(2 * p)] == held_twice
