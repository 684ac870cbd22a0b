"""Bubble and peak memory of every family against its formula, p = 2..16, F = B = W = 1.

Sources: the papers that each generator's docstring names; the table of what public generators of
others reach, which this library must reach too.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import pytest

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build

RANKS = range(2, 17)
ranks = pytest.mark.parametrize('p', RANKS)
chunks = pytest.mark.parametrize('v', [1, 2, 3])


class Facts(NamedTuple):
    """Idle time of the worst window and of the makespan, and peak memory; of one full rank."""

    window: float
    makespan: float
    peak: float


def facts(name: str, p: int, m: int, v: int | None = None, times=(1, 1, 1)) -> Facts:
    schedule = build(name, p, m, num_chunks=v)
    costs = Costs.uniform(schedule.placement, *times)
    timeline = simulate(schedule, costs)
    work = m * sum(times)
    amounts = max(timeline.windows) - work, timeline.makespan - work, max(peak(schedule, costs))
    return Facts(*(round(amount, 6) for amount in amounts))


def groups(m: int, size: int) -> int:
    """The largest of as many even groups of at least `size` as m has."""
    return ceil(m / max(1, m // size))


def near(amount: float) -> object:
    return pytest.approx(amount, abs=1e-5)


@ranks
def test_gpipe(p):
    for m in (1, p, 2 * p + 1):
        assert facts('gpipe', p, m) == (3 * (p - 1), 3 * (p - 1), m)


@ranks
@pytest.mark.parametrize('times', [(1, 1, 1), (1, 1.2, 0.8), (2, 3, 1)])
def test_1f1b(p, times):
    for m in (1, p - 1, p, 2 * p + 1):
        got = facts('1f1b', p, m, times=times)
        assert got.makespan == near((p - 1) * sum(times))
        assert got.peak == min(p, m)


@ranks
@pytest.mark.parametrize('times', [(1, 1, 1), (1, 1.2, 0.8), (2, 3, 1)])
def test_zb_h1(p, times):
    f, b, w = times
    for m in (2 * p - 1, 3 * p + 1):
        got = facts('zb-h1', p, m, times=times)
        assert got.window == near((p - 1) * (f + b - w))
        assert got.peak == p


@ranks
@pytest.mark.parametrize('times', [(1, 1, 1), (4, 4, 3), (2, 3, 1)])
def test_zb_h2(p, times):
    f, b, w = times
    for m in (2 * p - 1, 3 * p + 1):
        got = facts('zb-h2', p, m, times=times)
        assert got.window == near((p - 1) * (f + b - 2 * w))
        assert got.peak == 2 * p - 1
    assert facts('zb-h2', p, 2 * p).makespan == p - 1  # no better than ZB-H1 with the barrier


@ranks
def test_zb_1p_and_zb_2p(p):
    for m in (2 * p, 2 * p + 1):
        assert facts('zb-1p', p, m) == (p - 1, p - 1, p)
        assert facts('zb-2p', p, m) == (0, p - 1, 2 * p)


@ranks
@chunks
def test_loops(p, v):
    """Interleaved, breadth-first and zb-interleaved, m a multiple of p or not, also below it."""
    for m in (1, p - 1, p, 2 * p + 1):
        short = 3 * max(0, p - m) * (v - 1)
        g = groups(m, p)
        ahead = (2 if v > 1 else 1) * (p - 1) + 1
        got = facts('interleaved', p, m, v)
        assert got.makespan == near((3 * (p - 1) + short) / v)
        assert got.peak == near(min(m, ((v - 1) * g + ahead) / v))
        got = facts('breadth-first', p, m, v)
        assert got.makespan == near((3 * (p - 1) + short) / v)
        assert got.peak == m
        if m >= p:
            got = facts('zb-interleaved', p, m, v)
            assert got.makespan == near((p - 1) / v)
            assert got.peak == near(((v - 1) * g + p) / v)


@ranks
@chunks
def test_gis(p, v):
    for m in (p, 2 * p + 1):
        got = facts('gis', p, m, v)
        assert got.makespan == near(2 * (p - 1) / v)
        assert got.peak == near(((v - 1) * groups(m, p) + p) / v)
    g = ceil(p / 2)
    for m in (2 * g, 4 * g):
        got = facts('gis-h', p, m, v)
        assert got.makespan == near((2 * (p - 1) + (p - g) * (v - 1)) / v)
        assert got.peak == near((g * (v - 1) + p) / v)


@ranks
@chunks
def test_zeropp(p, v):
    unit = max(p, ceil(2 * (p - 1) / v))
    for m in (unit, 2 * unit + 1):
        assert facts('zeropp', p, m, v).makespan == near(2 * (p - 1) / v)
    assert facts('zeropp', p, 3 * unit, v).peak == near(unit + 2 * (p - 1) / v)


@ranks
def test_zb_v(p):
    for m in (2 * p - 1, 3 * p + 1):
        assert facts('zb-v', p, m) == (0, (p - 1) / 2, p)


@ranks
def test_zb_v_with_few_microbatches(p):
    for m in {1, p - 1, p, p + 1, 3 * p // 2, 2 * p - 2}:
        got = facts('zb-v', p, m)
        assert got.peak == min(p, m)
        if m >= p:
            assert got == ((2 * p - 1 - m) / 2, (p - 1) / 2, p)
        else:
            assert (p - 1) / 2 < got.makespan <= 2 * p - 1.5 - m
    assert facts('zb-v', p, 1).makespan == 2 * p - 2.5


@ranks
def test_v_half(p):
    for m in (2 * p, 3 * p + 1):
        got = facts('v-half', p, m)
        assert got.peak == (p + 2) // 2
        assert got.window == (0 if p == 2 else (3 * p - 7) / 2 if p % 2 == 0 else (3 * p - 4) / 2)
    assert all(facts('v-half', p, m).peak <= (p + 2) // 2 for m in (1, p))


@ranks
def test_v_min(p):
    for m in (2 * p, 3 * p + 1):
        got = facts('v-min', p, m)
        assert got.peak == (p + 4) // 3
        assert got.window <= ((4 * p - 7) / 2 if p % 3 == 0 else (4 * p - 5) / 2)
    assert all(facts('v-min', p, m).peak <= (p + 4) // 3 for m in (1, p))


@pytest.mark.parametrize('times', [(1, 1, 0.7), (3, 4, 2), (1, 1.2, 0.8)])
def test_of_the_two_only_v_half_stands_unequal_times(times):
    """The bubble of V-Half stays what it was, V-Min's grows with every microbatch."""
    few, many = (facts('v-half', 8, m, times=times).makespan for m in (32, 64))
    assert many == near(few)
    few, many = (facts('v-min', 8, m, times=times).makespan for m in (32, 64))
    assert many > 1.4 * few
    assert many > facts('1f1b', 8, 64, times=times).makespan


@ranks
def test_1f1b_v(p):
    for m in (2 * p, 3 * p + 1):
        got = facts('1f1b-v', p, m)
        assert got.peak == 2 * p // 3 + 1
        if p % 3 == 1:
            assert got.window == (5 * p - 5) / 2
        else:
            assert got.window <= (2 if p == 2 else (5 * p - 7) / 2)
    assert all(facts('1f1b-v', p, m).peak <= 2 * p // 3 + 1 for m in (1, p))


@ranks
def test_dualpipe_v(p):
    for m in (2 * p, 3 * p + 1):
        assert facts('dualpipe-v', p, m) == ((p - 1) / 2, (p - 1) / 2, p + 0.5)
    assert all(facts('dualpipe-v', p, m).peak <= min(m, p + 0.5) for m in (1, p, 2 * p - 1))


@ranks
@pytest.mark.parametrize('waves', [1, 2, 3])
def test_hanayo(p, waves):
    """At m = p the published share of idle time; beyond, only the memory is promised."""
    got = facts('hanayo', p, p, 2 * waves)
    share = got.makespan / (got.makespan + 3 * p)
    assert share <= (2 * p - 2) / (3 * p * waves + p - 1) + 1e-6
    assert all(facts('hanayo', p, m, 2 * waves).peak <= min(p, m) for m in (1, 2 * p + 1))
    if waves == 1:
        assert facts('hanayo', p, 2 * p, 2).makespan <= 2 * (p - 1) + 0.5


# Idle time of the worst window, and peak memory, of the public generators of others.
OTHERS = {
    ('1f1b', None): [(9, 4), (21, 8), (21, 8), (45, 16)],
    ('1f1b-v', None): [(7.5, 3), (16.5, 6), (16.5, 6), (37.5, 11)],
    ('interleaved', 2): [(4.5, 5.5), (10.5, 11.5), (10.5, 11.5), (22.5, 23.5)],
    ('zb-1p', None): [(3, 4), (7, 8), (7, 8), (15, 16)],
    ('zb-2p', None): [(0, 8), (0, 16), (0, 16), (0, 32)],
    ('zb-v', None): [(0, 4), (0, 8), (0, 8), (0, 16)],
    ('v-half', None): [(2.5, 3), (8.5, 5), (8.5, 5)],
    ('v-min', None): [(5.5, 2), (13.5, 4), (13.5, 4)],
}


@pytest.mark.parametrize(('name', 'v'), OTHERS)
def test_as_good_as_the_public_generators(name, v):
    for (p, m), (window, held) in zip([(4, 8), (8, 16), (8, 32), (16, 32)], OTHERS[name, v]):  # noqa: B905
        got = facts(name, p, m, v)
        assert got.window <= window
        assert got.peak <= held


def test_zb_v_makespan_at_unequal_times():
    """p=8, m=24, 1/1.2/0.8: the same 5.5 % as the best of others."""
    idle = facts('zb-v', 8, 24, times=(1, 1.2, 0.8)).makespan
    assert idle / (idle + 72) == pytest.approx(0.055, abs=5e-4)
