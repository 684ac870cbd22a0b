"""The simulator: against brute force, published tables and formulas, and the clock."""

import time
from dataclasses import replace
from itertools import pairwise
from random import Random

import oracle
import pytest
from grids import grid
from hypothesis import given
from hypothesis import strategies as st
from zero_bubble import TABLE_5, paper_costs

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.analysis.waits import critical_path
from megatron_zbpp.ir import Pass, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import chain
from megatron_zbpp.ir.grid import ScheduleError
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.offload.graph import offload

PLACEMENTS = (
    Placement.loop(1),
    Placement.loop(3),
    Placement.loop(2, 2),
    Placement.v(2),
    Placement.v(3),
    Placement.wave(2, 3),
    Placement((0, 1, 1, 2, 0)),
)


def random_costs(random, num_stages: int) -> Costs:
    times = [tuple(random.randint(0, 9) for _ in range(num_stages)) for _ in range(3)]
    hops = [(random.randint(0, 4), random.randint(0, 4)) for _ in range(num_stages - 1)]
    return Costs.of(
        *times,
        comm=random.choice((0, 0, 1, 5)),
        message=random.choice((0, 2)),
        hops=random.choice(([], hops)),
    )


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
    orders = ('0F0 0B0 0W0', '1F0 1B0 1W0')
    schedule = Schedule.of('x', Placement.loop(2), 1, [map(Pass.parse, o.split()) for o in orders])
    costs = Costs.of((1, 1), (2, 2), (4, 1), comm=0.5, message=0.5)
    path = critical_path(simulate(schedule, costs), costs)
    assert [(step.rank, str(step.ran), step.start, step.waited) for step in path] == [
        (0, '0F0', 0, 'start'),
        (1, '1F0', 2, 'communication'),
        (1, '1B0', 3, 'rank'),
        (0, '0B0', 6, 'communication'),
        (0, '0W0', 8, 'rank'),
    ]


def test_edges_within_a_rank_cost_nothing():
    one_rank = oracle.random_schedule(Random(0), Placement.loop(1, 4), 3)
    assert simulate(one_rank, Costs.uniform(one_rank.placement, comm=1000.0)).makespan == 9.0


@pytest.mark.parametrize('edge', [{'comm': 1.0}, {'message': 1.0}, {'comm': 0.4, 'message': 0.6}])
def test_edges_between_ranks_add_latency_and_message(edge):
    schedule = build('zb-v', 3, 1)
    near = Costs.uniform(schedule.placement)
    spent = simulate(schedule, replace(near, **edge)).makespan - simulate(schedule, near).makespan
    assert spent == pytest.approx(
        8
    )  # 2 edges each way along the V, both in F and in B; its fold is free


def test_each_route_runs_at_the_speed_of_its_ranks():
    """Two microbatches against each other, by hand: each stage on a fast rank and a slow one."""
    orders = ('0F0 1F1 1BW1 0BW0', '0F1 1F0 1BW0 0BW1')
    passes = [map(Pass.parse, o.split()) for o in orders]
    costs = Costs.of((1, 1), (1, 1), (1, 1), speeds=(1.0, 0.5))
    assert simulate(Schedule.of('x', Placement.two_way(2), 2, passes), costs).spans == (
        ((0, 1), (2, 3), (3, 5), (8, 10)),
        ((0, 2), (2, 4), (4, 8), (8, 12)),
    )


def test_deadlock_names_every_stuck_rank():
    orders = ('0F0 0BW0 0F1 0BW1', '1F0 1F1 1BW0 1BW1', '2F0 2BW0 2F1 2BW1')
    schedule = Schedule.of('x', Placement.loop(3), 2, [map(Pass.parse, o.split()) for o in orders])
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, Costs.uniform(schedule.placement))
    assert caught.value.what == (
        'deadlock, a cycle: rank 0 at 0BW0 waits for 1BW0, still to come on rank 1; '
        'rank 1 at 1F1 waits for 0F1, still to come on rank 0; '
        'stuck: rank 2 at 2F1 waits for 1F1, still to come on rank 1: '
        'move an awaited pass to before the one that waits'
    )
    assert 'rank 0   0F0  [0BW0] 0F1   0BW1' in str(caught.value)


@pytest.mark.parametrize(
    ('chunks', 'order', 'wait'),
    [
        (1, '0F0 0L0 0O0 0BW0', '0L0 waits for 0O0'),
        (2, '1F0 0F0 0O0 0L0 1BW0 0BW0', '1F0 waits for 0F0'),
    ],
)
def test_of_two_engines_the_first_that_waits_is_named(chunks, order, wait):
    """Both are stuck: that which copies, and that which computes."""
    graph, one = offload(chain(chunks), [0]), (1.0,) * chunks
    passes = [map(Pass.parse, order.split())]
    schedule = Schedule.of('x', Placement.loop(1, chunks), 1, passes, graph=graph)
    with pytest.raises(ScheduleError, match=f'rank 0 at {wait}, still to come on rank 0'):
        simulate(schedule, Costs.of(one, one, one, times={'O': one, 'L': one}))


def test_what_never_runs_is_named():
    orders = ('0F0 0BW0', '1F0')
    schedule = Schedule.of('x', Placement.loop(2), 1, [map(Pass.parse, o.split()) for o in orders])
    with pytest.raises(ScheduleError, match='rank 0 at 0BW0 waits for 1B0, which rank 1 never'):
        simulate(schedule, Costs.uniform(schedule.placement))


def test_costs_must_fit():
    with pytest.raises(ValueError, match='costs of 4 stages do not fit a placement of 3'):
        simulate(build('1f1b', 3, 3), Costs.uniform(Placement.v(2)))


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


@grid(automatic=(('zb-1p', 9, 1), ('zb-2p', 10, 2)), row=tuple(range(12)))
def test_zero_bubble_table_5_automatic(automatic, row):
    """At most the published bubble rate, under the paper's limit of p or 2p activations."""
    name, column, laps = automatic
    p, m = TABLE_5[row][:2]
    costs = paper_costs(row)
    schedule = build(name, p, m, costs=costs)
    assert round(simulate(schedule, costs).bubble_window, 4) <= TABLE_5[row][column]
    assert max(peak(schedule, costs)) <= laps * p * costs.amounts['activation'][0]


TIMES = ((1.0, 1.0, 1.0), (18.522, 18.086, 9.337), (1.0, 1.2, 0.8), (5.0, 6.0, 4.0))


@pytest.mark.parametrize('p', range(2, 17))
@pytest.mark.parametrize(('forward', 'backward', 'weight'), TIMES)
def test_published_bubbles(p, forward, backward, weight):
    """Idle time of the worst rank in its window (arXiv 2401.10241, table 2; section 6 for ZB-V)."""
    m = 2 * p
    total = m * (forward + backward + weight)
    bubbles = {
        '1f1b': (p - 1) * (forward + backward + weight),
        'zb-h1': (p - 1) * (forward + backward - weight),
        'zb-h2': (p - 1) * (forward + backward - 2 * weight),
    }
    for name, bubble in bubbles.items():
        schedule = build(name, p, m)
        costs = Costs.uniform(schedule.placement, forward, backward, weight)
        assert max(simulate(schedule, costs).windows) - total == pytest.approx(bubble), name


@pytest.mark.parametrize('p', range(2, 17))
@pytest.mark.parametrize('extra', [0, 1, 7])
def test_zb_v_has_no_bubble_at_equal_times(p, extra):
    """And its windows start half a rank's forward apart, so that (p-1)/2 remain of the makespan."""
    schedule = build('zb-v', p, 2 * p + extra)
    timeline = simulate(schedule, Costs.uniform(schedule.placement))
    assert max(timeline.windows) == pytest.approx(3 * (2 * p + extra))
    assert timeline.makespan - max(timeline.windows) == pytest.approx((p - 1) / 2)
    assert timeline.bubble_window == pytest.approx(0, abs=1e-12)


def large_schedule(p: int, m: int, v: int) -> Schedule:
    """All forwards, chunk by chunk, then B and W in turns: every rank has 3*m*v passes."""
    placement = Placement.loop(p, v)
    orders = []
    for rank in range(p):
        stages = placement.stages(rank)
        order = [Pass('F', s, i) for s in stages for i in range(m)]
        order += [Pass(k, s, i) for s in reversed(stages) for i in range(m) for k in ('B', 'W')]
        orders.append(order)
    return Schedule.of('large', placement, m, orders)


@pytest.mark.parametrize('m', [128, pytest.param(1024, marks=pytest.mark.full)])
def test_786432_passes_in_seconds(m):
    schedule = large_schedule(64, m, 4)
    costs = Costs.uniform(schedule.placement)
    start = time.process_time()
    timeline = simulate(schedule, costs)
    peaks = peak(schedule, costs)
    seconds = time.process_time() - start
    assert sum(map(len, timeline.spans)) == 768 * m
    assert peaks == (float(m),) * 64
    # Ranks work without a pause but for two ramps: the first F down 63 ranks, the first B up.
    assert timeline.makespan == pytest.approx(3 * m + 2 * 63 / 4)
    assert seconds < 5 * max(m / 1024, 0.4)


@pytest.mark.parametrize('name', ['po-h', 'bpipe'])
def test_what_pairs_save_is_saved_by_pairs_only(name):
    """Passes around copies run by themselves: they take their whole time."""
    schedule = build(name, 4, 8)
    ways = dict.fromkeys('OLEK', (0.5,) * schedule.num_stages)
    costs = Costs.uniform(schedule.placement).with_times(**ways)
    assert simulate(schedule, replace(costs, together=0.5)) == simulate(schedule, costs)
