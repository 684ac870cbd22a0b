"""Units and speeds change the numbers and nothing else: every answer follows, to the last bit.

All factors are powers of two, so that no rounding comes between.
"""

from dataclasses import replace

import pytest

from megatron_zbpp import Costs, Placement, Schedule, build, simulate
from megatron_zbpp.analysis.fit_costs import fit
from megatron_zbpp.analysis.gain import critical_path, gaps
from megatron_zbpp.analysis.memory import highest, peak
from megatron_zbpp.planner.ends import lower_bound, moving_bound
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.schedules import FAMILIES
from megatron_zbpp.techniques import find
from megatron_zbpp.techniques.base import copy_ratio
from megatron_zbpp.techniques.evict import with_eviction
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed

P, M = 4, 6
NAMES = [family.name for family in FAMILIES]
SPEEDS = (1.0, 2.0, 0.5, 4.0)
ACTIONS = {'offload'}, {'evict'}, {'recompute'}, {'offload', 'evict', 'recompute'}


def costs_of(placement: Placement) -> Costs:
    """Stages that differ, with all that costs can say, on ranks of other speeds."""
    stages = range(placement.num_stages)
    held = tuple(1.0 + s / 8 for s in stages)
    return Costs.of(
        tuple(2.0 + s % 3 for s in stages),
        tuple(3.0 + s % 2 for s in stages),
        tuple(1.5 + s % 4 / 2 for s in stages),
        comm=0.25,
        message=0.125,
        activation=held,
        retained=tuple(0.75 * each for each in held),
        edges=((0, 1, 0.75), (2, 1, 0.5)),
        hops=tuple((0.125 * s, 0.25) for s in stages[1:]),
        speeds=SPEEDS,
        times={kind: tuple(1.0 + s % 2 for s in stages) for kind in 'OLEKR'},
        amounts={'input': (0.125,) * len(stages)},
    )


def in_their_time(costs: Costs, placement: Placement) -> Costs:
    """The same, with what passes take on their ranks instead of speeds."""

    def taken(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(t / SPEEDS[placement.only_route[s]] for s, t in enumerate(times))

    return replace(
        costs, times={kind: taken(each) for kind, each in costs.times.items()}, speeds=()
    )


def of_time(costs: Costs, by: float) -> Costs:
    """The same in a unit of time that is so many times smaller."""

    def scaled(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(by * t for t in times)

    return replace(
        costs,
        times={kind: scaled(each) for kind, each in costs.times.items()},
        comm=by * costs.comm,
        message=by * costs.message,
        edges=tuple((sender, receiver, by * t) for sender, receiver, t in costs.edges),
        hops=tuple((by * there, by * back) for there, back in costs.hops),
    )


def of_memory(costs: Costs, by: float) -> Costs:
    """The same in a unit of memory that is so many times smaller."""
    return replace(
        costs, amounts={name: tuple(by * a for a in each) for name, each in costs.amounts.items()}
    )


def two_way(schedule: Schedule) -> bool:
    return bool(schedule.placement.opposite)


@pytest.mark.parametrize('name', [family.name for family in FAMILIES if family.num_routes == 1])
def test_a_rank_of_twice_the_speed_takes_half_the_time(name):
    """Where a stage is on two ranks, no times of stages say what it takes."""
    schedule = build(name, P, M)
    costs = costs_of(schedule.placement)
    plain = in_their_time(costs, schedule.placement)
    fast, slow = simulate(schedule, costs), simulate(schedule, plain)
    assert fast.spans == slow.spans
    assert critical_path(fast, costs) == critical_path(slow, plain)


@pytest.mark.parametrize('copies', [1, 8])  # which the bounds hardly see, and see first
@pytest.mark.parametrize('objective', ['makespan', 'window'])
@pytest.mark.parametrize('placement', [Placement.loop(P), Placement.v(P), Placement.loop(P, 3)])
def test_bounds_know_speeds(placement, objective, copies):
    costs = costs_of(placement)
    moved = {*costs.times} - {*'FBW'}
    slow = {kind: tuple(copies * t for t in costs.times[kind]) for kind in moved}
    costs = costs.with_times(**slow)
    both = [
        Problem(placement, M, each, (2.0,) * P, objective)
        for each in (costs, in_their_time(costs, placement))
    ]
    assert lower_bound(both[0]) == lower_bound(both[1])
    for actions in ACTIONS:
        one, other = (
            moving_bound(problem, [find(name) for name in sorted(actions)]) for problem in both
        )
        assert one == pytest.approx(other, rel=1e-12), actions


@pytest.mark.parametrize('name', NAMES)
def test_in_another_unit_of_time(name):
    schedule = build(name, P, M)
    costs = costs_of(schedule.placement)
    other = of_time(costs, 4)
    one, four = simulate(schedule, costs), simulate(schedule, other)
    assert four.spans == tuple(tuple((4 * a, 4 * b) for a, b in own) for own in one.spans)
    assert (four.makespan, four.bubble_makespan) == (4 * one.makespan, one.bubble_makespan)
    assert [4 * gap.length for gap in gaps(one, 0.5)] == [gap.length for gap in gaps(four, 2.0)]
    assert {pair: 4 * lag for pair, lag in one.lags().items()} == four.lags()
    found, scaled = fit(one, 0.25), fit(four, 1.0)
    assert scaled.times['F'] == pytest.approx([4 * t for t in found.times['F']], rel=1e-12)
    assert scaled.times['W'] == pytest.approx([4 * t for t in found.times['W']], rel=1e-12)
    assert copy_ratio(other) == copy_ratio(costs)
    if not schedule.graph.techniques and not two_way(schedule):
        assert offloaded(schedule, 1, other) == offloaded(schedule, 1, costs)
        assert recomputed(schedule, 1, other) == recomputed(schedule, 1, costs)


@pytest.mark.parametrize('name', NAMES)
def test_in_another_unit_of_memory(name):
    schedule = build(name, P, M)
    costs = costs_of(schedule.placement)
    other = of_memory(costs, 8)
    assert peak(schedule, other) == tuple(8 * held for held in peak(schedule, costs))
    assert [[8 * held for held in own] for own in highest(schedule, costs)] == [
        list(own) for own in highest(schedule, other)
    ]
    if not schedule.graph.techniques and not two_way(schedule):
        stages = range(schedule.num_stages)
        limits = [0.75 * held for held in peak(schedule, costs)]
        moved = with_eviction(schedule, stages, costs, limits)
        assert moved == with_eviction(schedule, stages, other, [8 * limit for limit in limits])
