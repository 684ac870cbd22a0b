"""Costs and timelines: what the numbers mean, and which are refused."""

from __future__ import annotations

import json
from collections import deque
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp import Costs, Pass, Placement, Schedule, build, simulate
from megatron_zbpp.ir import chain
from megatron_zbpp.ir.graph import compiled
from megatron_zbpp.ir.machine import Machine
from megatron_zbpp.ir.plan_costs import joined, stages_file
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.schedules import families


def test_uniform_times_are_of_a_full_rank():
    costs = Costs.uniform(Placement.wave(2, 4), forward=1, backward=2, weight=3, comm=0.5)
    assert costs.num_stages == 8
    assert [costs.duration(chain(8), kind, 5, 1) for kind in ('F', 'B', 'W', 'BW')] == [
        0.25,
        0.5,
        0.75,
        1.25,
    ]
    assert costs.amounts['activation'] == costs.amounts['retained'] == (0.25,) * 8
    assert (costs.edge(0, 1), costs.edge(1, 1)) == (0.5, 0)
    costs = Costs.uniform(Placement((0, 1, 0)))
    assert costs.times['F'] == costs.amounts['activation'] == (0.5, 1.0, 0.5)
    # a microbatch visits one of the two stages of each rank
    one, two = Costs.uniform(Placement.loop(4)), Costs.uniform(Placement.two_way(4))
    assert (two.times, two.amounts) == (one.times, one.amounts)


def test_edges_and_hops():
    hops = Costs.of([1] * 4, [1] * 4, [1] * 4, comm=0.5, hops=[(1, 2), (3, 4), (5, 6)])
    assert Costs.of((1, 1), (1, 1), (1, 1), comm=0.25, message=0.5).edge(0, 1) == 0.75
    # there and back; nothing between stages of a rank, nor for other than neighbouring stages
    assert [hops.edge(0, 1, (s, s + 1)) for s in range(3)] == [1.5, 3.5, 5.5]
    assert [hops.edge(1, 0, (s + 1, s)) for s in range(3)] == [2.5, 4.5, 6.5]
    assert hops.edge(1, 1, (1, 2)) == 0 and hops.edge(0, 1) == hops.edge(0, 1, (0, 3)) == 0.5
    assert hops.edge(0, 1, (3, 4)) == 0.5  # a site behind the stages
    # what is between the stages that are left; within a stage that is cut, what comes before
    both, cut = joined(hops, 2), joined(hops, 8)
    assert both is not None and both.hops == ((3, 4),)
    assert cut is not None and cut.hops == tuple(hops.hops[max(0, k // 2 - 1)] for k in range(1, 8))


@given(st.randoms())
def test_a_file_of_stages_keeps_times_of_messages(random):
    """It is read to the same times of all messages; one with `comm` alone, too."""
    edges = [(a, b, random.random()) for a, b in ((0, 1), (1, 0)) if random.random() < 0.5]
    hops = random.choice([(), [(random.random(), random.random()) for _ in range(3)]])
    message = random.choice([0.0, 0.25])
    costs = Costs.of(*[[1.0] * 4] * 3, comm=0.5, message=message, edges=edges, hops=hops)
    assert Costs.from_json(stages_file(costs, 'Et|t|t|tL', [[0, 1, 1, 0]])) == costs
    assert json.loads(stages_file(costs, None)).keys() >= {'F', 'B', 'W', 'comm'}
    old = Costs.from_json('{"F": [1, 1], "B": [1, 1], "W": [1, 1], "comm": 0.5}')
    assert json.loads(stages_file(old, None)).keys() == {'F', 'B', 'W', 'comm'}


def test_defaults_hold_one_activation_until_weight():
    costs = Costs.of([1, 2], [3, 4], [5, 6])
    assert costs.times['F'] == (1, 2)
    assert costs.amounts['activation'] == costs.amounts['retained'] == (1.0, 1.0)
    assert Costs.of((1,), (1,), (1,), activation=(7.0,)).amounts['retained'] == (7.0,)


def test_timeline_measures():
    orders = [[Pass('F', 0, 0), Pass('BW', 0, 0)], [Pass('F', 1, 0), Pass('BW', 1, 0)]]
    schedule = Schedule.of('x', Placement.loop(2), 1, orders)
    timeline = Timeline(schedule, (((10.0, 11.0), (16.0, 18.0)), ((12.0, 13.0), (13.0, 15.0))))
    assert timeline.makespan == 8
    assert timeline.windows == (8, 3)
    assert [timeline.busy(rank) for rank in range(2)] == [3, 3]
    assert timeline.bubble_makespan == timeline.bubble_window == 5 / 8
    orders = [[Pass('F', 0, 0)], [Pass('F', 1, 0)]]
    schedule = Schedule.of('x', Placement.loop(2), 1, orders)
    timeline = Timeline(schedule, (((0.0, 2.0),), ((2.0, 4.0),)))
    assert (timeline.bubble_makespan, timeline.bubble_window) == (0.5, 0.0)


def test_selective_recomputation_says_what_differs():
    """What it is silent of is as without it; times of other kinds need not be there."""
    text = '{"F": [1], "B": [1], "W": [3], "selective": {"B": [2], "activation": [0.5]}}'
    costs = Costs.from_json(text, selective=True)
    assert (costs.times['F'], costs.times['B'], costs.times['W']) == ((1,), (2,), (3,))
    assert costs.amounts['activation'] == (0.5,) and costs.times.keys() == {*'FBW'}
    assert Costs.from_json(text).times['B'] == (1,)


# ---- The clock that is asked pass by pass says what the simulation says of whole orders.


NAMES = [each.name for each in families() if not each.moves]


@pytest.mark.parametrize('name', NAMES)
def test_pass_by_pass_as_whole_orders(name):
    """Slices, shards, two routes, and updates that come once a batch and are looked back to."""
    schedule = build(name, 4, 8)
    assert not compiled(schedule.graph).on_copy_engines and not schedule.together
    costs = Costs.uniform(schedule.placement, 1.0, 1.25, 0.5, comm=0.125)
    machine = Machine.of(schedule, costs)
    orders, clocks = list(map(deque, schedule.passes)), [0.0] * schedule.num_ranks
    found: list[list[tuple[float, float]]] = [[] for _ in orders]
    while any(orders):
        before = sum(map(len, orders))
        for rank, order in enumerate(orders):
            while order and (arrival := machine.arrival(order[0])) < inf:
                start = max(clocks[rank], arrival)
                clocks[rank] = machine.run(order.popleft(), start)
                found[rank].append((start, clocks[rank]))
        assert sum(map(len, orders)) < before, 'no rank can go on'
    assert tuple(map(tuple, found)) == simulate(schedule, costs).spans
