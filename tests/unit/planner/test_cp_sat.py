"""The exact solver and the lower bounds against all orders of a tiny problem."""

import sys
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_zbpp import Costs, Placement, build, check, simulate
from megatron_zbpp.planner import cp_sat
from megatron_zbpp.planner.ends import lower_bound, replay, replay_whole
from megatron_zbpp.planner.limits import same_limits
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.planner.search import extrapolate
from megatron_zbpp.techniques.slices.balance import Attention, in_parts
from megatron_zbpp.techniques.slices.graph import Slicing

PLACEMENT, M = Placement.loop(2), 3
# One microbatch after the other: possible under any limit, and far from the best.
START = [[0, 2, 4] * M, [1, 3, 5] * M]
times = st.sampled_from([0.0, 0.5, 1.0, 1.7, 3.1415926535])
pairs = st.tuples(times, times)


def arrangements(queues: tuple[int, ...], m: int) -> list[list[int]]:
    """Every order in which a rank could run m passes of F, B and W, each microbatch in turn."""
    orders = [[]]
    for _ in range(m * len(queues)):
        orders = [
            [*order, queue]
            for order in orders
            for queue, before in zip(queues, (None, *queues), strict=False)
            if order.count(queue) < (m if before is None else order.count(before))
        ]
    return orders


def optimum(problem: Problem) -> float:
    """The least value of all orders that fit."""
    possible = [
        [order for order in arrangements(queues, M) if problem.fits_rank(rank, order)]
        for rank, queues in enumerate(problem.queues)
    ]
    best = inf
    for orders in product(*possible):
        result = replay(problem, list(orders), cap=best)
        best = best if result is None else min(best, result[0])
    return best


@settings(max_examples=15)
@given(
    pairs,
    pairs,
    pairs,
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, 1.0, [2.0, 1.0]]),
    st.sampled_from([(1.0, 1.0), (0.25, 0.5), (1.5, 2.0)]),
    st.sampled_from(['makespan', 'window']),
)
@example(*[(0.0, 0.0)] * 3, 0.3, 1.0, (1.0, 1.0), 'makespan')
@example(*[(0.0, 0.0)] * 3, 0.3, [2.0, 1.0], (1.5, 2.0), 'window')
@example((1.0, 0.0), (0.0, 1.7), (0.0, 0.0), 0.0, 1.0, (0.25, 0.5), 'makespan')
def test_agrees_with_trying_all(forward, backward, weight, comm, limit, retained, objective):
    """Also where B adds to what its rank holds."""
    costs = Costs.of(forward, backward, weight, comm, retained=retained)
    if limit is not None and max(retained) > 1:
        limit = [
            most + kept - 1 for most, kept in zip(same_limits(limit, 2), retained, strict=True)
        ]
    problem = Problem(PLACEMENT, M, costs, same_limits(limit, 2), objective)
    best, bound = optimum(problem), lower_bound(problem)
    assert bound <= best + 1e-9
    answer = cp_sat.solve(problem, START, bound, enough=1e6, effort=10, seconds=60)
    assert replay(problem, answer.orders)[0] == pytest.approx(best, abs=1e-2)
    assert best - 1e-2 <= answer.bound <= best + 1e-9
    planned = plan([(PLACEMENT, costs)], M, memory_limit=limit, objective=objective, seconds=0.2)
    assert planned.value == pytest.approx(best)


def test_nothing_is_better_than_the_optimum():
    problem = Problem(PLACEMENT, M, Costs.uniform(PLACEMENT, 2, 3, 1), same_limits(2, 2))
    found = cp_sat.solve(problem, START, 0.0, enough=1e6, effort=10, seconds=60)
    best = replay(problem, found.orders)[0]
    assert found.bound == best and not found.overran
    answer = cp_sat.solve(problem, START, 0.0, enough=best - 1, effort=10, seconds=60)
    assert answer.orders is None and answer.bound == best - 1


def test_without_or_tools(monkeypatch):
    monkeypatch.setattr(cp_sat, 'available', lambda: False)
    costs = Costs.uniform(PLACEMENT, 1, 2, 3)
    made = plan([(PLACEMENT, costs)], 4, memory_limit=1, seconds=0.2)
    assert made.lower_bound <= made.value
    monkeypatch.setitem(sys.modules, 'ortools.sat.python', None)
    problem = Problem(PLACEMENT, 4, costs, same_limits(1, 2))
    with pytest.raises(ValueError, match='pip install'):
        cp_sat.solve(problem, [], 0.0, enough=1e6, effort=1, seconds=1)


@pytest.mark.parametrize('objective', ['makespan', 'window'])
@pytest.mark.parametrize(
    ('edges', 'speeds', 'hops'),
    [
        (((0, 1, 1.5), (1, 0, 0.25)), (), ()),
        ((), (1.0, 2.0), ()),
        (((0, 1, 0.7),), (0.5, 1.0), ((0.0, 1.5),)),
    ],
)
def test_links_and_speeds_of_their_own(edges, speeds, hops, objective):
    """Latencies of each direction and hop, ranks of several speeds: the optimum of all orders."""
    costs = Costs.of((1.0, 1.0), (1.7, 1.0), (1.0, 0.5), 0.1, edges=edges, speeds=speeds, hops=hops)
    problem = Problem(PLACEMENT, M, costs, same_limits(2, 2), objective)
    best = optimum(problem)
    answer = cp_sat.solve(problem, START, lower_bound(problem), enough=1e6, effort=10, seconds=60)
    assert replay(problem, answer.orders)[0] == pytest.approx(best, abs=1e-2)
    assert best - 1e-2 <= answer.bound <= best + 1e-9


def test_hops_of_a_pair_in_ticks():
    """Two ranks of a V exchange messages of unlike stages: each keeps its own time."""
    hops = [(0.5, 1.0), (9.0, 9.0), (2.0, 0.0)]
    costs = Costs.of(*[[1.0] * 4] * 3, 0.25, edges=[(0, 1, 0.75)], hops=hops)
    problem = Problem(Placement.v(2), M, costs, same_limits(9, 2))
    scaled = cp_sat.in_ticks(problem, 0.25, 3)
    assert {edge for inputs in problem.inputs for _, edge in inputs} >= {1.25, 2.25, 0.75}
    assert scaled.inputs == tuple(
        tuple((need, 12 * edge) for need, edge in inputs) for inputs in problem.inputs
    )


@pytest.mark.parametrize('limit', [1.3, inf])
@pytest.mark.parametrize(('sizes', 'share'), [((4, 3, 1), 0.0), ((4, 3, 1), 0.5), ((1, 1, 1), 0.0)])
def test_slices_that_differ(sizes, share, limit):
    """Of all orders of one sequence none is better, with keys and values, and none is above."""
    placement = PLACEMENT
    costs = Costs.of([1.0, 1.5], [1.2, 1.0], [0.5, 0.5], retained=[1.3, 1.3])
    costs = costs.with_amounts(kv=[0.1] * 2)
    costs = in_parts(costs.with_amounts(kv_gradient=[0.1] * 2), sizes, Attention(share))
    problem = Problem(placement, M, costs, (limit, limit), graph=Slicing(M, sizes)(2))
    orders = [[0] * M + [2, 4] * M, [1] * M + [3, 5] * M]
    value, _ = replay_whole(problem, orders)
    answer = cp_sat.solve(problem, orders, lower_bound(problem), value, 10.0, 600.0)
    assert answer.orders is not None and problem.fits(answer.orders)
    check(problem.schedule(answer.orders, 'exact'))
    found, best = replay_whole(problem, answer.orders)[0], optimum(problem)
    assert found == pytest.approx(best, rel=1e-3)
    assert best * 0.999 <= answer.bound <= best + 1e-9
    free = optimum(replace(problem, limits=(inf, inf)))
    assert (best > free) == (limit < inf and sizes[0] > sizes[-1])


# ---- Orders of few microbatches, their steady state repeated for many.


SHAPES = [('zb-h1', Placement.loop(4)), ('zb-h2', Placement.loop(3)), ('zb-v', Placement.v(3))]


def problem(placement: Placement, m: int, limit: float = inf) -> Problem:
    return Problem(placement, m, Costs.uniform(placement), (limit,) * placement.num_ranks)


@pytest.mark.parametrize('more', [1, 2, 17, 30])
@pytest.mark.parametrize(('name', 'placement'), SHAPES)
def test_a_rhythm_goes_on(name, placement, more):
    """As the family itself does it: each further microbatch costs one beat."""
    few = problem(placement, 12)
    many = replace(few, num_microbatches=12 + more)
    family = build(name, placement.num_ranks, 12 + more)
    found = extrapolate(few, few.orders(build(name, placement.num_ranks, 12)), many)
    assert found is not None
    made = many.schedule(found.orders, 'made')
    assert check(made).schedule.num_microbatches == 12 + more
    assert found.value == pytest.approx(simulate(made, many.costs).makespan)
    assert found.value <= simulate(family, many.costs).makespan + 1e-9


def test_nothing_repeats():
    """A rank that does all forwards first has no part that leaves memory as it was."""
    few = problem(Placement.loop(2), 2)
    apart = [sorted(order) for order in few.orders(build('zb-h1', 2, 2))]
    assert extrapolate(few, apart, replace(few, num_microbatches=3)) is None
