"""The checker: refuses every malformed schedule, with the place, and no other."""

import re
from collections import Counter
from random import Random

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import random_schedule
from orders import by_hand
from programs import posted_earlier

from megatron_zbpp import Costs, Pass, Placement, Schedule, ScheduleError, build, check
from megatron_zbpp.analysis import checker as module
from megatron_zbpp.analysis.deadlock import prove
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import highest, live, peak
from megatron_zbpp.analysis.program import EARLY
from megatron_zbpp.ir import BW, KINDS, B, F, W
from megatron_zbpp.schedules import names


def schedule_like(schedule: Schedule, orders: list[list[Pass]]) -> Schedule:
    return Schedule.of('like', schedule.placement, schedule.num_microbatches, orders)


def is_legal(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


def test_a_large_grid_shows_only_the_place():
    schedule = build('zb-h1', 32, 64)
    orders = list(map(list, schedule.passes))
    orders[20].remove(Pass(W, 20, 30))
    with pytest.raises(ScheduleError, match='never does the weight gradient of') as caught:
        check(schedule_like(schedule, orders))
    _, above, *grid, below = str(caught.value).splitlines()
    assert (above, below) == ('(14 more above)', '(5 more below)')
    assert [line.split()[1] for line in grid] == [str(rank) for rank in range(14, 27)]
    assert '[20W31]' in grid[6] and max(map(len, grid)) <= 100


def test_programs_that_cannot_run_are_refused(monkeypatch):
    """As all were whose receives were posted a pass early: with the rule, and the places."""

    def lower_too_early(schedule, receives):
        prove(posted_earlier(lower(schedule, EARLY), 1))

    monkeypatch.setattr(module, 'lower', lower_too_early)
    with pytest.raises(ScheduleError, match='synchronisation: rank 0 waits at 0F1 for') as error:
        check(build('zb-h1', 2, 4))
    first, second = str(error.value).splitlines()[1:]
    assert '0F0 [0F1] 0B0' in first and '[1F0] 1B0' in second


def test_memory_limit():
    """As large as this it is kept; what is said of smaller ones: cli/refused_values.json."""
    check(build('1f1b', 4, 8), memory_limit=4)
    costs = Costs.of((1, 1), (1, 1), (1, 1), activation=(100, 500))
    check(build('1f1b', 2, 4), memory_limit=500, costs=costs)
    costs = Costs.of((1,), (1,), (1,), activation=(2,), retained=(5,))
    check(by_hand(1, 2, '0F0 0F1 0B0 0W0 0BW1'), memory_limit=7, costs=costs)
    # 7/3 of an activation fit into a limit of 7/3, whatever was rounded on the way
    schedule = oracle.random_schedule(Random(1), Placement.loop(1, 3), 5)
    peak = Counter(p.kind for p in schedule.passes[0])[F] / 3
    for limit in (peak, round(peak, 9)):
        check(schedule, memory_limit=limit)


# ---- Mutants. (torch 2.13's validator lets duplicates and waits in a circle through.)


seeds = st.integers(0, 2**32)


@st.composite
def valid(draw) -> Schedule:
    """A schedule of the library, or any legal one."""
    p, m = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    name = draw(st.sampled_from([*names(plain=True), 'random']))
    if name != 'random':
        return build(name, p, m)
    placement = draw(st.sampled_from([Placement.loop(p), Placement.v(p), Placement.wave(2, 3)]))
    return oracle.random_schedule(Random(draw(seeds)), placement, m)


def dropped(draw, orders):
    order = draw(st.sampled_from(orders))
    order.pop(draw(st.integers(0, len(order) - 1)))


def duplicated(draw, orders):
    p = draw(st.sampled_from([p for order in orders for p in order]))
    order = draw(st.sampled_from(orders))
    order.insert(draw(st.integers(0, len(order))), p)


def moved_to_another_rank(draw, orders):
    source, target = draw(st.permutations(range(len(orders))))[:2]
    p = orders[source].pop(draw(st.integers(0, len(orders[source]) - 1)))
    orders[target].insert(draw(st.integers(0, len(orders[target]))), p)


def retargeted(draw, orders):
    """To another kind, stage or microbatch, known or not."""
    order = draw(st.sampled_from(orders))
    at = draw(st.integers(0, len(order) - 1))
    p = order[at]
    order[at] = draw(
        st.one_of(
            st.sampled_from([*KINDS, 'R', '']).map(lambda kind: p._replace(kind=kind)),
            st.integers(-1, 9).map(lambda stage: p._replace(stage=stage)),
            st.integers(-1, 6).map(lambda microbatch: p._replace(microbatch=microbatch)),
        ).filter(lambda other: other != p)
    )


@pytest.mark.parametrize('mutate', [dropped, duplicated, moved_to_another_rank, retargeted])
@given(st.data(), valid())
def test_mutants_are_refused(mutate, data, schedule):
    orders = list(map(list, schedule.passes))
    mutate(data.draw, orders)
    assert not is_legal(schedule_like(schedule, orders))


# ---- Brute force on small cases: the same verdict, yes or no.

SMALL = (
    (Placement.loop(1), 2, (F, B, W)), (Placement.loop(1, 2), 1, (F, B, W)),
    (Placement.loop(2), 1, (F, B, W)), (Placement.v(2), 1, (F, BW)),
    (Placement.loop(2), 2, (F, BW)), (Placement.loop(3), 1, (F, B)), (Placement.loop(3), 2, (F,)),
    (Placement.v(2), 2, (F,)),
)  # fmt: skip


@pytest.mark.parametrize(('placement', 'm', 'kinds'), SMALL)
def test_every_order_of_small_schedules(placement, m, kinds):
    verdicts = Counter()
    for schedule in oracle.all_orders(placement, m, kinds):
        verdict = is_legal(schedule)
        assert verdict == oracle.legal(schedule), schedule.passes
        verdicts[verdict] += 1
    assert verdicts[False] and bool(verdicts[True]) == (kinds != (F, B))


PLACEMENTS = (Placement.loop(2), Placement.loop(3), Placement.v(2), Placement((1, 0, 0, 1, 0)))


@settings(max_examples=500)
@given(seeds, st.sampled_from(PLACEMENTS), st.integers(1, 3))
def test_agrees_with_brute_force(seed, placement, m):
    random = Random(seed)
    schedule = oracle.random_schedule(random, placement, m)
    assert is_legal(schedule)
    assert oracle.legal(schedule)
    for change in (oracle.shuffled, oracle.reordered):
        other = change(random, schedule)
        assert is_legal(other) == oracle.legal(other)


# ---- Activations that ranks hold.


# activations of a stage and what waits for W; what is held behind each pass, and at most within
HELD = [
    ('0F0 1F0 1B0 0B0 0F1 0W0 1W0 1F1 1BW1 0BW1', (10, 4), (3, 1),
     (10, 14, 11, 4, 14, 11, 10, 14, 10, 0), (10, 14, 11, 4, 14, 11, 10, 14, 11, 3)),
    ('0F0 0B0 0W0', (2,), (3,), (2, 3, 0), (2, 3, 0)),  # B may hold more than F
    # between its B and its W a BW holds what waits; where no W is alone, nothing waits
    ('0F0 0F1 0BW0 0B1 0W1', (2,), (5,), (2, 4, 2, 5, 0), (2, 4, 7, 5, 0)),
    ('0F0 0F1 0BW0 0BW1', (2,), (5,), (2, 4, 2, 0), (2, 4, 2, 0)),
]  # fmt: skip


@pytest.mark.parametrize(('order', 'activation', 'retained', 'behind', 'within'), HELD)
def test_each_pass_takes_and_releases_its_share(order, activation, retained, behind, within):
    ones = (1,) * len(activation)
    costs = Costs.of(ones, ones, ones, activation=activation, retained=retained)
    schedule = by_hand(Placement.loop(1, len(ones)), len(re.findall('0F', order)), order)
    assert live(schedule, costs) == (behind,)
    assert highest(schedule, costs) == (within,)
    assert peak(schedule, costs) == (max(within),)


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


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 4))
def test_nothing_remains_and_the_order_alone_counts(seed, p, m):
    random = Random(seed)
    schedule = random_schedule(random, Placement.v(p), m)
    amounts = [(random.randint(1, 9), random.randint(0, 9)) for _ in range(2 * p)]
    amounts = dict(zip(('activation', 'retained'), zip(*amounts, strict=True), strict=True))
    ones, times = (1,) * 2 * p, tuple(random.random() for _ in range(2 * p))
    fast = Costs.of(ones, ones, ones, **amounts)
    slow = Costs.of(times, times, times, comm=3.0, **amounts)
    assert live(schedule, fast) == live(schedule, slow)
    assert [after[-1] for after in live(schedule, fast)] == [0.0] * p
    most = highest(schedule, fast)
    assert all(max(a) == b for a, b in zip(most, peak(schedule, fast), strict=True))
