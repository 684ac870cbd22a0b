"""The schedule as a value."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp import Costs, ModelLayout, Pass, Placement, Schedule, build, simulate
from megatron_zbpp.ir import KINDS, chain
from megatron_zbpp.ir.graph import compiled
from megatron_zbpp.ir.machine import Machine
from megatron_zbpp.ir.placement import layers_per_stage, layout_string
from megatron_zbpp.ir.plan_costs import stages_file
from megatron_zbpp.ir.schedule import grid
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.schedules import families

passes = st.builds(
    Pass, st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 999), st.integers(0, 9)
)


@given(passes)
def test_pass_text_and_back(p):
    assert Pass.parse(str(p)) == p


def test_placements():
    assert Placement.loop(3, 2).only_route == (0, 1, 2, 0, 1, 2)
    assert Placement.v(3).only_route == (0, 1, 2, 2, 1, 0)
    assert Placement.wave(2, 4).only_route == (0, 1, 1, 0, 0, 1, 1, 0)
    named = Placement.loop(3, 2), Placement.v(3), Placement.wave(3, 2), Placement.wave(2, 4)
    assert [placement.name for placement in named] == ['loop', 'v', 'v', 'wave']
    vee = Placement.v(3)
    assert [vee.stages(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert vee.chunks == (0, 0, 0, 1, 1, 1) and vee.num_chunks == 2
    assert vee.reversed().only_route == (2, 1, 0, 0, 1, 2) and vee.reversed().reversed() == vee
    assert vee.reversed().name == vee.name
    two = Placement.two_way(2)
    assert two.routes == ((0, 1), (1, 0)) and not two.is_one_way
    # a plan's placement has no name, and a model that was laid out for a V fits it
    v = Placement.v(4)
    assert Placement(v.only_route) == v and hash(Placement(v.only_route)) == hash(v)
    assert Placement(v.only_route) != v.reversed()
    schedule = build('zb-v', 2, 3)
    assert schedule.reversed().reversed() == schedule
    assert schedule.reversed().passes == schedule.passes[::-1]
    cells = replace(schedule, together=frozenset({(0, 2), (1, 3)}))
    assert cells.reversed().together == {(1, 2), (0, 3)}
    forward = schedule.forward_only()
    assert sum(map(len, forward.passes)) == 4 * 3
    assert all(p.kind == 'F' for _, p in forward)


# ---- Which layers a stage holds.


@pytest.mark.parametrize(
    ('num_layers', 'placement', 'ends', 'counts'),
    [
        (8, Placement.loop(4), (False, False), [2, 2, 2, 2]),
        (9, Placement.loop(4), (False, False), [2, 3, 2, 2]),  # the ends have other work
        (6, Placement.loop(4), (True, True), [1, 2, 2, 1]),
        (7, Placement.loop(4), (True, False), [1, 2, 2, 2]),
        (7, Placement.loop(4), (False, True), [2, 2, 2, 1]),
        (11, Placement.loop(4), (False, False), [3, 3, 3, 2]),
        (11, Placement.loop(4), (True, False), [2, 3, 3, 3]),
        (11, Placement.loop(4), (True, True), [3, 3, 3, 2]),
        (9, Placement.v(2), (False, True), [2, 3, 2, 2]),
        (9, Placement.v(2), (True, True), [2, 3, 3, 1]),
        (8, Placement.v(3), (False, False), [1, 2, 2, 1, 1, 1]),  # one more a rank at most
        # ranks 0 and 1 hold stages 0 and 1, each on one of two routes
        (8, Placement((0, 1, 2, 3), '', (1, 0, 3, 2), (0, 1)), (True, True), [2, 2, 3, 1]),
    ],
)
def test_layers_are_spread_evenly(num_layers, placement, ends, counts):
    assert layers_per_stage(num_layers, placement, *ends) == counts
    assert sum(counts) == num_layers


def test_few_layers():
    assert layers_per_stage(4, Placement.v(2)) == [1] * 4
    # an embedding that counts as a layer is one
    assert layers_per_stage(3, Placement.v(2), embedding=True) == [0, 1, 1, 1]
    layout = ModelLayout(Placement.v(2), (2, 1, 1, 2))
    assert layout.num_chunks == 2
    assert layout.text == layout_string((2, 1, 1, 2)) == 'Ett|t|t|ttL'
    assert layout_string((1, 2), mtp_num_layers=1) == 'Et|ttmL'
    assert [layout.stages(rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert [layout.is_first(stage) for stage in range(4)] == [True, False, False, False]
    assert [layout.is_last(stage) for stage in range(4)] == [False, False, False, True]
    assert ModelLayout(Placement.loop(1), (4,)).text is None


# ---- An order as text, in columns.


@pytest.fixture
def schedule():
    return build('zb-v', 6, 40)


def test_small_one_whole():
    assert grid(build('1f1b', 2, 2)) == (
        'rank 0   0F0   0F1   0BW0  0BW1\nrank 1   1F0   1BW0  1F1   1BW1'
    )


@pytest.mark.parametrize('cell', [(0, 0), (3, 100), (5, 239)])
@pytest.mark.parametrize('width', [30, 80, 200])
def test_marked_cell_is_in_the_cut(schedule, cell, width):
    rank, index = cell
    lines = grid(schedule, [cell], width=width).splitlines()
    assert f'[{schedule.passes[rank][index]}]' in lines[rank]
    assert sum(line.count('[') for line in lines) == 1
    assert max(map(len, lines)) <= width
    assert len(lines) == 6


def test_cuts_are_around_the_marks(schedule):
    short = replace(schedule, passes=(*schedule.passes[:5], schedule.passes[5][:-1]))
    assert grid(short, [(5, 239)]).splitlines()[5].endswith('[___]')
    lines = grid(build('1f1b', 64, 2), [(40, 1)], height=5).splitlines()
    assert lines[0] == '(38 more above)'
    assert lines[3].startswith('rank 40') and '[40F1]' in lines[3]
    assert lines[-1] == '(21 more below)'
    lines = grid(schedule, [(0, 10), (4, 200)]).splitlines()
    assert f'[{schedule.passes[0][10]}]' in lines[0]
    assert f'[{schedule.passes[4][200]}]' in lines[4]
    # behind the passes that are shown, where there are more
    schedule = build('1f1b', 2, 8)
    whole, cut = grid(schedule, width=1000), grid(schedule, width=40)
    assert '…' not in whole
    assert all(line.endswith('…') and len(line) <= 40 for line in cut.splitlines())


@pytest.mark.parametrize('case', [(22, 8), (46, 16), (62, 32), (30, 8)], ids=str)
@pytest.mark.parametrize('name', ['zb-v', 'zb-h1', 'interleaved', 'hanayo'])
def test_what_divides_by_ranks_is_even(case, name):
    num_layers, num_ranks = case
    placement = build(name, num_ranks, 1).placement
    layers = layers_per_stage(num_layers, placement, embedding=1, loss=1)
    assert sum(layers) == num_layers
    assert layers[-1] == 0 or (name, case) != ('zb-v', (22, 8))
    units = [layers[0] + 1, *layers[1:-1], layers[-1] + 1]
    of_ranks = {sum(units[s] for s in placement.stages(rank)) for rank in range(num_ranks)}
    assert of_ranks == {(num_layers + 2) // num_ranks}


# ---- Costs and timelines: what the numbers mean.


def test_uniform_times_are_of_a_full_rank():
    costs = Costs.uniform(Placement.wave(2, 4), forward=1, backward=2, weight=3, comm=0.5)
    assert costs.num_stages == 8
    durations = [costs.duration(chain(8), kind, 5, 1) for kind in ('F', 'B', 'W', 'BW')]
    assert durations == [0.25, 0.5, 0.75, 1.25]
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
    both, cut = hops.joined(2), hops.joined(8)
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
