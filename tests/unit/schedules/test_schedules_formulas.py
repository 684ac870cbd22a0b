"""Bubble and peak memory of every family: its formula against simulation, p = 2..16.

The formulas are the registry's, which `zbpp list` and the docs show. Beside them stand facts that
are no formula of one family, and what public generators of others reach, which this library must
reach too.
"""

import math
import re
from itertools import product
from typing import NamedTuple

import pytest
from published import published

from megatron_zbpp import Costs, build, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.schedules import FAMILIES, Formula, Sizes

RANKS = (2, 3, 4, 5, 6, 7, 8, 9, 16)  # every remainder that a formula knows
TIMES = ((1, 1, 1), (1, 1.2, 0.8), (2, 3, 1), (4, 4, 3))
ranks = pytest.mark.parametrize('p', RANKS)
families = pytest.mark.parametrize('family', FAMILIES, ids=lambda family: family.name)


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


def near(amount: float) -> object:
    return pytest.approx(amount, abs=1e-5)


@families
@pytest.mark.parametrize('p', [*RANKS[:-1], pytest.param(16, marks=pytest.mark.full)])
def test_formulas(family, p):
    """Wherever a family promises a number, simulation finds just that, or no more."""
    bubbles = peaks = 0
    for v, m in product(family.chunks[:3], {1, p - 1, p, 2 * p, 3 * p + 1, 4 * ((p + 1) // 2)}):
        schedule = build(family.name, p, m, num_chunks=v)
        if family.memory.where(Sizes(p, m, v)):
            peaks += 1
            found = max(peak(schedule, Costs.uniform(schedule.placement)))
            assert agrees(family.memory, Sizes(p, m, v), found)
        for times in TIMES:
            if family.bubble.where(sizes := Sizes(p, m, v, *times)):
                bubbles += 1
                timeline = simulate(schedule, Costs.uniform(schedule.placement, *times))
                assert agrees(family.bubble, sizes, max(timeline.windows) - m * sum(times))
    assert bubbles and peaks, 'nothing is promised at these sizes'


def agrees(formula: Formula, sizes: Sizes, found: float) -> bool:
    promised = formula(sizes)
    return found <= promised + 1e-5 if formula.at_most else found == near(promised)


@families
def test_a_formula_says_what_it_computes(family):
    """Its text, read as arithmetic, gives its number."""
    sizes = Sizes(8, 48, family.chunks[:3][-1], 2, 3, 1.5)
    for formula in (family.bubble, family.memory):
        if not set(formula.text.split()) & {'even', 'odd'}:  # these are no single term
            assert read(formula.text, sizes) == near(formula(sizes)), formula.text


def read(text: str, sizes: Sizes) -> float:
    """What the term at the beginning of `text` comes to."""
    term = re.split(r' \(F=|, or|, g', text)[0].removeprefix('at most ').removeprefix('about ')
    term = re.sub(r'(?<=[\dpgmvFBW)])(?=[pgmvFBW(])', '*', term)
    return eval(term, {'floor': math.floor, 'g': math.ceil(sizes.p / 2), **sizes._asdict()})


@ranks
def test_gpipe_and_1f1b_take_the_same_time(p):
    for m in (1, p, 2 * p + 1):
        assert facts('gpipe', p, m)[:2] == facts('1f1b', p, m)[:2] == (3 * (p - 1), 3 * (p - 1))


@ranks
def test_with_the_barrier_zb_h2_and_zb_2p_are_no_better(p):
    assert facts('zb-h2', p, 2 * p).makespan == p - 1
    for m in (2 * p, 2 * p + 1):
        assert facts('zb-1p', p, m).makespan == facts('zb-2p', p, m).makespan == p - 1


@ranks
@pytest.mark.parametrize('v', [1, 2, 3])
def test_loops_with_few_microbatches(p, v):
    """Below p microbatches each chunk but one waits for what is missing."""
    for m in (1, p - 1):
        short = 3 * (p - m) * (v - 1)
        for name in ('interleaved', 'breadth-first'):
            assert facts(name, p, m, v).makespan == near((3 * (p - 1) + short) / v)


@ranks
def test_zb_v_with_few_microbatches(p):
    assert facts('zb-v', p, 2 * p).makespan == (p - 1) / 2
    for m in {1, p - 1, p, p + 1, 3 * p // 2, 2 * p - 2}:
        got = facts('zb-v', p, m)
        assert got.peak == min(p, m)
        if m >= p:
            assert got == ((2 * p - 1 - m) / 2, (p - 1) / 2, p)
        else:
            assert (p - 1) / 2 < got.makespan <= 2 * p - 1.5 - m
    assert facts('zb-v', p, 1).makespan == 2 * p - 2.5


@pytest.mark.parametrize('times', [(1, 1, 0.7), (3, 4, 2), (1, 1.2, 0.8)])
def test_of_the_two_only_v_half_stands_unequal_times(times):
    """The bubble of V-Half stays what it was, V-Min's grows with every microbatch."""
    few, many = (facts('v-half', 8, m, times=times).makespan for m in (32, 64))
    assert many == near(few)
    few, many = (facts('v-min', 8, m, times=times).makespan for m in (32, 64))
    assert many > 1.4 * few
    assert many > facts('1f1b', 8, 64, times=times).makespan


@ranks
def test_dualpipe_v(p):
    assert facts('dualpipe-v', p, 2 * p).makespan == (p - 1) / 2
    assert all(facts('dualpipe-v', p, m).peak <= min(m, p + 0.5) for m in (1, p, 2 * p - 1))


@ranks
@pytest.mark.parametrize('waves', [1, 2, 3])
def test_hanayo(p, waves):
    """At m = p the published share of idle time; beyond, only the memory is promised."""
    got = facts('hanayo', p, p, 2 * waves)
    share = got.makespan / (got.makespan + 3 * p)
    assert share <= (2 * p - 2) / (3 * p * waves + p - 1) + 1e-6
    if waves == 1:
        assert facts('hanayo', p, 2 * p, 2).makespan <= 2 * (p - 1) + 0.5


@pytest.mark.parametrize(
    ('name', 'v', 'others'), published(__file__, 'public generators of others')
)
def test_as_good_as_the_public_generators(name, v, others):
    for (p, m), (window, held) in zip([(4, 8), (8, 16), (8, 32), (16, 32)], others):  # noqa: B905
        got = facts(name, p, m, v)
        assert got.window <= window
        assert got.peak <= held


def test_zb_v_makespan_at_unequal_times():
    """p=8, m=24, 1/1.2/0.8: the same 5.5 % as the best of others."""
    idle = facts('zb-v', 8, 24, times=(1, 1.2, 0.8)).makespan
    assert idle / (idle + 72) == pytest.approx(0.055, abs=5e-4)
