"""Costs and timelines: what the numbers mean, and which are refused."""

import json
import re
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp.ir import Pass, Placement, Schedule, chain
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.plan_costs import joined, stages_file
from megatron_zbpp.ir.timeline import Timeline


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


def test_uniform_divides_by_what_each_rank_holds():
    costs = Costs.uniform(Placement((0, 1, 0)))
    assert costs.times['F'] == costs.amounts['activation'] == (0.5, 1.0, 0.5)


def test_uniform_does_not_count_the_copy_on_the_other_route():
    """A microbatch visits one of the two stages of each rank."""
    one, two = Costs.uniform(Placement.loop(4)), Costs.uniform(Placement.two_way(4))
    assert (two.times, two.amounts) == (one.times, one.amounts)


def test_an_edge_takes_latency_and_message():
    assert Costs.of((1, 1), (1, 1), (1, 1), comm=0.25, message=0.5).edge(0, 1) == 0.75


HOPS = Costs.of([1] * 4, [1] * 4, [1] * 4, comm=0.5, hops=[(1, 2), (3, 4), (5, 6)])


def test_hops_of_unlike_edges():
    """There and back; nothing between stages of a rank, nor for other than neighbouring stages."""
    assert [HOPS.edge(0, 1, (s, s + 1)) for s in range(3)] == [1.5, 3.5, 5.5]
    assert [HOPS.edge(1, 0, (s + 1, s)) for s in range(3)] == [2.5, 4.5, 6.5]
    assert HOPS.edge(1, 1, (1, 2)) == 0 and HOPS.edge(0, 1) == HOPS.edge(0, 1, (0, 3)) == 0.5
    assert HOPS.edge(0, 1, (3, 4)) == 0.5  # a site behind the stages


def test_hops_of_joined_stages():
    """What is between the stages that are left; within a stage that is cut, what comes before."""
    both, cut = joined(HOPS, 2), joined(HOPS, 8)
    assert both is not None and both.hops == ((3, 4),)
    assert cut is not None and cut.hops == tuple(HOPS.hops[max(0, k // 2 - 1)] for k in range(1, 8))


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


def test_hops_of_another_number_of_stages():
    for hops in ([(1, 1)], [(1, 1, 1)] * 2, [(1, 1)] * 3):
        with pytest.raises(
            ValueError, match=r'hops has .*for each of the 2 stages before the last'
        ):
            Costs.of([1] * 3, [1] * 3, [1] * 3, hops=hops)


def test_defaults_hold_one_activation_until_weight():
    costs = Costs.of([1, 2], [3, 4], [5, 6])
    assert costs.times['F'] == (1, 2)
    assert costs.amounts['activation'] == costs.amounts['retained'] == (1.0, 1.0)
    assert Costs.of((1,), (1,), (1,), activation=(7.0,)).amounts['retained'] == (7.0,)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'forward': (1.0, -2.0)}, r'F = -2\.0'),
        ({'weight': (1.0, float('nan'))}, 'W = nan'),
        ({'backward': (1.0, float('inf'))}, 'B = inf'),
        ({'comm': -1.0}, r'comm = -1\.0'),
        ({'message': float('nan')}, 'message = nan'),
        ({'retained': (1.0, -1.0)}, r'retained = -1\.0'),
        ({'weight': (1.0,)}, 'W has 1 entries and F 2'),
        ({'activation': (1.0,) * 3}, 'activation has 3 entries and F 2'),
    ],
)
def test_refuses_what_is_no_cost(fields, message):
    with pytest.raises(ValueError, match=message):
        Costs.of(**{**dict.fromkeys(('forward', 'backward', 'weight'), (1.0, 1.0)), **fields})


@pytest.mark.parametrize('wrong', [[1.0], {'R': 1.0}, {'R': ['x']}, {'R': [1.0, None]}, {'R': []}])
@pytest.mark.parametrize('field', ['times', 'amounts'])
def test_refuses_other_than_lists_of_numbers_by_name(field, wrong):
    file = {'F': [1.0], 'B': [1.0], 'W': [1.0], field: wrong}
    message = re.escape('is not an object of lists of numbers, such as {"R": [1, 1]}')
    with pytest.raises(ValueError, match=message):
        Costs.from_json(json.dumps(file))


def test_refuses_another_number_of_stages():
    with pytest.raises(ValueError, match='costs of 4 stages do not fit a placement of 2'):
        Costs.uniform(Placement.v(2)).require(Placement.loop(2))


@pytest.mark.parametrize(('fields', 'message'), [
    ({'speeds': (1.0,) * 3}, '3 speeds do not fit 2 ranks: give one each'),
    ({'edges': ((0, 2, 1.0),)}, 'an edge from rank 0 to rank 2: there are ranks 0 to 1'),
])  # fmt: skip
def test_refuses_ranks_that_a_placement_has_not(fields, message):
    one = (1.0, 1.0)
    with pytest.raises(ValueError, match=message):
        Costs.of(one, one, one, **fields).require(Placement.loop(2))
    Costs.of(one, one, one, speeds=one, edges=((0, 1, 1.0),)).require(Placement.loop(2))


def test_timeline_measures():
    orders = [[Pass('F', 0, 0), Pass('BW', 0, 0)], [Pass('F', 1, 0), Pass('BW', 1, 0)]]
    schedule = Schedule.of('x', Placement.loop(2), 1, orders)
    timeline = Timeline(schedule, (((10.0, 11.0), (16.0, 18.0)), ((12.0, 13.0), (13.0, 15.0))))
    assert timeline.makespan == 8
    assert timeline.windows == (8, 3)
    assert [timeline.busy(rank) for rank in range(2)] == [3, 3]
    assert timeline.bubble_makespan == timeline.bubble_window == 5 / 8


def test_window_and_makespan_differ_where_ranks_start_late():
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


def test_no_activations_are_not_taken_for_ones():
    fields = json.loads(json.dumps(asdict(Costs.of((1.0,), (1.0,), (1.0,)))))
    fields['amounts']['activation'] = []
    with pytest.raises(ValueError, match=r'amounts.*is not an object of lists of numbers'):
        Costs.from_fields(fields)
