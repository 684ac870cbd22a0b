"""The simulator: against brute force, published tables and formulas, and the clock."""

import time
from dataclasses import replace
from itertools import pairwise
from random import Random

import oracle
import pytest
from figures import held, span, timeline
from grids import grid
from hypothesis import given
from hypothesis import strategies as st
from orders import by_hand
from zero_bubble import TABLE_5, paper_costs

from megatron_zbpp import Costs, Pass, Placement, Schedule, build, simulate
from megatron_zbpp.analysis.gain import critical_path, gain_text, gaps, idle_parts, makespan_of
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.schedules import names

PLACEMENTS = (
    Placement.loop(1), Placement.loop(3), Placement.loop(2, 2), Placement.v(2), Placement.v(3),
    Placement.wave(2, 3), Placement((0, 1, 1, 2, 0)),
)  # fmt: skip


def random_costs(random, num_stages: int) -> Costs:
    times = [tuple(random.randint(0, 9) for _ in range(num_stages)) for _ in range(3)]
    hops = [(random.randint(0, 4), random.randint(0, 4)) for _ in range(num_stages - 1)]
    comm, message = random.choice((0, 0, 1, 5)), random.choice((0, 2))
    return Costs.of(*times, comm=comm, message=message, hops=random.choice(([], hops)))


runs = given(st.integers(0, 2**32), st.sampled_from(PLACEMENTS), st.integers(1, 3))


@runs
def test_agrees_with_brute_force(seed, placement, m):
    random = Random(seed)
    schedule = oracle.random_schedule(random, placement, m)
    costs = random_costs(random, placement.num_stages)
    assert simulate(schedule, costs).spans == oracle.spans(schedule, costs)


@runs
def test_critical_path_explains_the_makespan(seed, placement, m):
    random = Random(seed)
    schedule = oracle.random_schedule(random, placement, m)
    costs = random_costs(random, placement.num_stages)
    timeline = simulate(schedule, costs)
    path = critical_path(timeline, costs)
    ranks = placement.only_route
    edges = [0.0]
    for before, step in pairwise(path):
        stages = before.ran.stage, step.ran.stage
        sent = costs.edge(ranks[stages[0]], ranks[stages[1]], stages)
        edges.append(sent if step.waited == 'communication' else 0.0)
    assert sum(step.end - step.start for step in path) + sum(edges) == timeline.makespan
    assert (path[0].start, path[0].waited, path[0].on) == (0, 'start', None)
    for before, step, edge in zip(path, path[1:], edges[1:], strict=False):
        assert step.on == before.ran
        assert step.start == before.end + edge
        assert (step.waited == 'rank') <= (step.rank == before.rank)


def test_critical_path_by_hand():
    """One microbatch over two ranks and back: nothing to wait for but the other rank."""
    schedule = by_hand(2, 1, '0F0 0B0 0W0', '1F0 1B0 1W0')
    costs = Costs.of((1, 1), (2, 2), (4, 1), comm=0.5, message=0.5)
    path = critical_path(simulate(schedule, costs), costs)
    assert [(step.rank, str(step.ran), step.start, step.waited) for step in path] == [
        (0, '0F0', 0, 'start'),
        (1, '1F0', 2, 'communication'),
        (1, '1B0', 3, 'rank'),
        (0, '0B0', 6, 'communication'),
        (0, '0W0', 8, 'rank'),
    ]
    one_rank = oracle.random_schedule(Random(0), Placement.loop(1, 4), 3)
    assert simulate(one_rank, Costs.uniform(one_rank.placement, comm=1000.0)).makespan == 9.0


def test_each_route_runs_at_the_speed_of_its_ranks():
    """Two microbatches against each other, by hand: each stage on a fast rank and a slow one."""
    schedule = by_hand(Placement.two_way(2), 2, '0F0 1F1 1BW1 0BW0', '0F1 1F0 1BW0 0BW1')
    costs = Costs.of((1, 1), (1, 1), (1, 1), speeds=(1.0, 0.5))
    assert simulate(schedule, costs).spans == (
        ((0, 1), (2, 3), (3, 5), (8, 10)),
        ((0, 2), (2, 4), (4, 8), (8, 12)),
    )


@pytest.mark.parametrize('row', range(12))
def test_zero_bubble_table_5_with_its_memory(row):
    """To the four published decimals, and the paper's peak of every rank (table 2).

    Either alone would not do: two wrong orders have the right rate.
    """
    p, m = TABLE_5[row][:2]
    costs = paper_costs(row)
    m_b, m_w = costs.amounts['activation'][0], costs.amounts['retained'][0]
    peaks = {
        '1f1b': [(p - s) * m_b for s in range(p)],
        'zb-h1': [(p - s) * m_b + s * m_w for s in range(p)],
        'zb-h2': [(2 * p - 2 * s - 1) * m_b + 2 * s * m_w for s in range(p)],
    }
    for (name, memory), rate in zip(peaks.items(), TABLE_5[row][6:9], strict=True):
        schedule = build(name, p, m)
        assert round(simulate(schedule, costs).bubble_window, 4) == rate, name
        assert list(peak(schedule, costs)) == memory, name
    assert held(build('zb-v', p, m)) == (p,) * p, 'the same on every rank: arXiv 2401.10241, 6'


@grid(automatic=(('zb-1p', 9, 1), ('zb-2p', 10, 2)), row=tuple(range(12)))
def test_zero_bubble_table_5_automatic(automatic, row):
    """At most the published bubble rate, under the paper's limit of p or 2p activations."""
    name, column, laps = automatic
    p, m = TABLE_5[row][:2]
    costs = paper_costs(row)
    schedule = build(name, p, m, costs=costs)
    assert round(simulate(schedule, costs).bubble_window, 4) <= TABLE_5[row][column]
    assert max(peak(schedule, costs)) <= laps * p * costs.amounts['activation'][0]


@pytest.mark.parametrize('m', [128, pytest.param(1024, marks=pytest.mark.full)])
def test_786432_passes_in_seconds(m):
    """All forwards, chunk by chunk, then B and W in turns."""
    placement, orders = Placement.loop(64, 4), []
    for stages in map(placement.stages, range(64)):
        order = [Pass('F', s, i) for s in stages for i in range(m)]
        order += [Pass(k, s, i) for s in reversed(stages) for i in range(m) for k in 'BW']
        orders.append(order)
    schedule, costs = Schedule.of('large', placement, m, orders), Costs.uniform(placement)
    start = time.process_time()
    found, peaks = simulate(schedule, costs), peak(schedule, costs)
    seconds = time.process_time() - start
    assert sum(map(len, found.spans)) == 768 * m
    assert peaks == (float(m),) * 64
    # Ranks work without a pause but for two ramps: the first F down 63 ranks, the first B up.
    assert found.makespan == pytest.approx(3 * m + 2 * 63 / 4)
    assert seconds < 5 * max(m / 1024, 0.4)


@pytest.mark.parametrize('name', ['po-h', 'bpipe'])
def test_what_pairs_save_is_saved_by_pairs_only(name):
    """Passes around copies run by themselves: they take their whole time."""
    schedule = build(name, 4, 8)
    ways = dict.fromkeys('OLEK', (0.5,) * schedule.num_stages)
    costs = Costs.uniform(schedule.placement).with_times(**ways)
    assert simulate(schedule, replace(costs, together=0.5)) == simulate(schedule, costs)


# ---- Gains against another schedule, and the parts of idle GPU time.


EACH = st.lists(st.sampled_from((0.5, 1.0, 1.25, 3.0)), min_size=8, max_size=8)


@given(name=st.sampled_from(('zb-v', 'interleaved', 'hanayo')), times=EACH, comm=st.floats(0, 0.5))
def test_parts_sum_to_the_idle_time(name, times, comm):
    costs = Costs.of(times, times, times, comm)
    found = simulate(build(name, 4, 6), costs)
    parts = idle_parts(found, costs)
    assert sum(parts) == pytest.approx(found.idle_all_ranks)
    assert parts.schedule > -1e-12 and parts.uneven_stages > -1e-12


def test_each_cause_is_told_by_itself():
    schedule = build('1f1b', 4, 8)
    even = Costs.uniform(schedule.placement)
    assert idle_parts(simulate(schedule, even), even) == pytest.approx((3 / 11, 0, 0))
    late, wide = replace(even, comm=0.25), replace(even, hops=((0.25, 0.25),) * 3)
    found = simulate(schedule, late)
    assert idle_parts(found, late).messages == pytest.approx(1 - 33 / found.makespan)
    assert idle_parts(simulate(schedule, wide), wide) == idle_parts(found, late)
    heavy = Costs.of(*[(1, 1, 1, 3)] * 3)
    found = simulate(schedule, heavy)
    uneven = idle_parts(found, heavy)
    assert uneven.uneven_stages == pytest.approx((8 * 9 - 8 * 18 / 4) / found.makespan)
    assert uneven.messages == 0


def test_the_rival_runs_the_same_model():
    """Stages of a V are joined for 1F1B, and those of 1F1B cut for several chunks."""
    times = (1.0, 2.0, 3.0, 4.0)
    joined = simulate(build('1f1b', 2, 6), Costs.of((3, 7), (3, 7), (3, 7))).makespan
    assert makespan_of('1f1b', build('zb-v', 2, 6), Costs.of(times, times, times)) == joined
    plain = build('1f1b', 4, 8), Costs.uniform(Placement.loop(4))
    cut = pytest.approx(span(build('interleaved', 4, 8)))
    assert makespan_of('interleaved', *plain) == cut and makespan_of('1f1b', *plain) == 33
    three, alone = build('interleaved', 2, 4, num_chunks=3), build('gpipe', 1, 4)
    for each in (three, alone):
        assert makespan_of('zb-v', each, Costs.uniform(each.placement)) is None
    assert gain_text(2.0, None, 'zb-v') == ''
    assert gain_text(33.0, 30.0, '1f1b') == ', 10.0% more time than 1f1b'


def test_gaps_of_1f1b():
    """By hand: p = 2, m = 2, F 1, BW 2."""
    found = timeline(build('1f1b', 2, 2))
    assert [
        (g.rank, g.where, g.start, g.length, str(g.before), str(g.after)) for g in gaps(found)
    ] == [
        (0, 'inside', 2, 2, '0F1', '0BW0'),
        (0, 'inside', 6, 1, '0BW0', '0BW1'),
        (1, 'start', 0, 1, 'None', '1F0'),
        (1, 'end', 7, 2, '1BW1', 'None'),
    ]
    assert [g.length for g in gaps(found, least=1)] == [2, 2]


@pytest.mark.parametrize('name', names())
def test_gaps_and_passes_are_the_whole_time(name):
    found = timeline(build(name, 4, 6), 1, 1.3, 0.6, comm=0.2)
    for rank in range(4):
        idle = sum(gap.length for gap in gaps(found) if gap.rank == rank)
        assert idle + found.busy(rank) == pytest.approx(found.makespan)
