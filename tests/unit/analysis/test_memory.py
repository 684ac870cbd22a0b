"""Activations that ranks hold."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import random_schedule

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import highest, live, peak
from megatron_zbpp.ir import Pass, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.grid import ScheduleError
from megatron_zbpp.schedules import build


def one_rank(text: str, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    order = map(Pass.parse, text.split())
    return Schedule.of('x', Placement.loop(1, num_chunks), num_microbatches, [order])


def test_each_pass_takes_and_releases_its_share():
    costs = Costs.of((1, 1), (1, 1), (1, 1), activation=(10, 4), retained=(3, 1))
    schedule = one_rank('0F0 1F0 1B0 0B0 0F1 0W0 1W0 1F1 1BW1 0BW1', 2, num_chunks=2)
    assert live(schedule, costs) == ((10, 14, 11, 4, 14, 11, 10, 14, 10, 0),)
    assert peak(schedule, costs) == (14,)


def test_b_may_hold_more_than_f():
    """Where B keeps output gradients for W, memory grows at B."""
    costs = Costs.of((1,), (1,), (1,), activation=(2,), retained=(3,))
    assert live(one_rank('0F0 0B0 0W0', 1), costs) == ((2, 3, 0),)
    assert peak(one_rank('0F0 0B0 0W0', 1), costs) == (3,)


def test_bw_is_a_b_and_a_w():
    """In between it holds what waits for W; in a schedule without any W, nothing waits."""
    costs = Costs.of((1,), (1,), (1,), activation=(2,), retained=(5,))
    split = one_rank('0F0 0F1 0BW0 0B1 0W1', 2)
    assert live(split, costs) == ((2, 4, 2, 5, 0),)
    assert highest(split, costs) == ((2, 4, 7, 5, 0),)
    assert peak(split, costs) == (7,)
    fused = one_rank('0F0 0F1 0BW0 0BW1', 2)
    assert highest(fused, costs) == live(fused, costs) == ((2, 4, 2, 0),)


@pytest.mark.parametrize(
    ('order', 'at'), [('0F0 0F1 0B0 0W0 0BW1', '0B0'), ('0F0 0F1 0BW0 0B1 0W1', '0BW0')]
)
def test_the_check_counts_what_b_adds(order, at):
    costs = Costs.of((1,), (1,), (1,), activation=(2,), retained=(5,))
    check(one_rank(order, 2), memory_limit=7, costs=costs)
    with pytest.raises(ScheduleError, match=f'holds activations of 7 at {at}, 7 at its peak'):
        check(one_rank(order, 2), memory_limit=6, costs=costs)


@pytest.mark.parametrize('v', [3, 6, 7, 10])
def test_fractions_of_an_activation_add_up(v):
    """v chunks of a v-th are exactly one, and what is released leaves exactly nothing."""
    m, stages = 50, range(v)
    forwards = [Pass('F', s, i) for s in stages for i in range(m)]
    backwards = [Pass('BW', s, i) for s in reversed(stages) for i in range(m)]
    schedule = Schedule.of('x', Placement.loop(1, v), m, [forwards + backwards])
    costs = Costs.uniform(schedule.placement)
    assert peak(schedule, costs) == (50.0,)
    assert live(schedule, costs)[0][-1] == 0.0


@pytest.mark.parametrize('p', range(2, 17))
@pytest.mark.parametrize('extra', [0, 1, 5])
def test_published_peaks(p, extra):
    """Per rank, i from 1: arXiv 2401.10241, table 2; ZB-V, section 6: the same on every rank."""
    m = 2 * p - 1 + extra
    m_b, m_w = 34 + 5 * 24, 32
    costs = Costs.uniform(Placement.loop(p))
    costs = Costs.of(
        costs.times['F'],
        costs.times['B'],
        costs.times['W'],
        activation=(m_b,) * p,
        retained=(m_w,) * p,
    )
    ranks = range(1, p + 1)
    assert peak(build('1f1b', p, m), costs) == tuple((p - i + 1) * m_b for i in ranks)
    h1 = tuple((p - i + 1) * m_b + (i - 1) * m_w for i in ranks)
    assert peak(build('zb-h1', p, m), costs) == h1
    h2 = tuple((2 * p - 2 * i + 1) * m_b + (2 * i - 2) * m_w for i in ranks)
    assert peak(build('zb-h2', p, m), costs) == h2
    zb_v = build('zb-v', p, m)
    assert peak(zb_v, Costs.uniform(zb_v.placement)) == (float(p),) * p


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 4))
def test_nothing_remains_and_the_order_alone_counts(seed, p, m):
    random = Random(seed)
    schedule = random_schedule(random, Placement.v(p), m)
    amounts = [(random.randint(1, 9), random.randint(0, 9)) for _ in range(2 * p)]
    held, kept = zip(*amounts, strict=True)
    times = tuple(random.random() for _ in range(2 * p))
    fast = Costs.of((1,) * 2 * p, (1,) * 2 * p, (1,) * 2 * p, activation=held, retained=kept)
    slow = Costs.of(times, times, times, comm=3.0, activation=held, retained=kept)
    assert live(schedule, fast) == live(schedule, slow)
    assert [after[-1] for after in live(schedule, fast)] == [0.0] * p
    most = highest(schedule, fast)
    assert all(max(a) == b for a, b in zip(most, peak(schedule, fast), strict=True))


def test_a_rank_without_passes_holds_nothing():
    idle = Schedule.of('idle', Placement.loop(2), 0, [[], []])
    assert peak(idle, Costs.uniform(idle.placement)) == (0.0, 0.0)


def test_costs_must_fit():
    with pytest.raises(ValueError, match='costs of 2 stages do not fit a placement of 1'):
        peak(one_rank('0F0 0BW0', 1), Costs.uniform(Placement.loop(2)))
