"""The exact solver and lower bounds against all orders of tiny problems.

Of two ranks all orders are tried, with all that may be done of the actions.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf

import pytest
from grids import grid
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_zbpp import Costs, Pass, Placement, Schedule, ScheduleError, build, check, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import Graph, chain
from megatron_zbpp.ir.graph import DEVICE, HOST, PARTNER
from megatron_zbpp.planner import cp_sat
from megatron_zbpp.planner.cp_sat import solve_offload
from megatron_zbpp.planner.ends import lower_bound, moving_bound, replay, replay_whole
from megatron_zbpp.planner.limits import same_limits
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.planner.search import extrapolate
from megatron_zbpp.techniques import find
from megatron_zbpp.techniques.offload import offload
from megatron_zbpp.techniques.recompute import recompute
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


# latencies of each direction and hop, and ranks of several speeds
LINKS = [
    {},
    {'edges': ((0, 1, 1.5), (1, 0, 0.25))},
    {'speeds': (1.0, 2.0)},
    {'edges': ((0, 1, 0.7),), 'speeds': (0.5, 1.0), 'hops': ((0.0, 1.5),)},
]
UNEVEN = (1.0, 1.0), (1.7, 1.0), (1.0, 0.5)


@settings(max_examples=15)
@given(
    pairs,
    pairs,
    pairs,
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, 1.0, [2.0, 1.0]]),
    st.sampled_from([(1.0, 1.0), (0.25, 0.5), (1.5, 2.0)]),
    st.sampled_from(['makespan', 'window']),
    st.sampled_from(LINKS),
)
@example(*[(0.0, 0.0)] * 3, 0.3, 1.0, (1.0, 1.0), 'makespan', {})
@example(*[(0.0, 0.0)] * 3, 0.3, [2.0, 1.0], (1.5, 2.0), 'window', {})
@example((1.0, 0.0), (0.0, 1.7), (0.0, 0.0), 0.0, 1.0, (0.25, 0.5), 'makespan', {})
@example(*UNEVEN, 0.1, 2.0, (1.0, 1.0), 'makespan', LINKS[1])
@example(*UNEVEN, 0.1, 2.0, (1.0, 1.0), 'window', LINKS[2])
@example(*UNEVEN, 0.1, 2.0, (1.0, 1.0), 'makespan', LINKS[3])
@example(*UNEVEN, 0.1, 2.0, (1.0, 1.0), 'window', LINKS[3])
def test_agrees_with_trying_all(forward, backward, weight, comm, limit, retained, objective, links):
    """Also where B adds to what its rank holds."""
    costs = Costs.of(forward, backward, weight, comm, retained=retained, **links)
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


# ---- Bounds under a limit where activations move or are made again: below every optimum, too.


full = partial(pytest.param, marks=pytest.mark.full)
FEW = 2
PAIR = Placement.loop(2)


def costed(placement=PAIR, times=(1.0, 1.0, 1.0), copy=0.5, again=1.0, kept=0.1, more=1.0):
    """The first stage has `more` activations than the others."""
    plain = Costs.uniform(placement, *times)
    count = placement.num_stages
    held = (more, *plain.amounts['activation'][1:])
    timed = plain.with_times(**dict.fromkeys('OLEK', (copy,) * count), R=(again,) * count)
    return timed.with_amounts(activation=held, retained=held, input=(kept,) * count)


def graphs(actions: frozenset[str]) -> Iterator[Graph]:
    """All that may be done of each stage."""
    for state in itertools.product(['keep', *sorted(actions)], repeat=2):
        graph = chain(2)
        for action, makes in (
            ('recompute', recompute),
            ('offload', lambda g, s: offload(g, s, HOST)),
            ('evict', lambda g, s: offload(g, s, PARTNER)),
        ):
            stages = [stage for stage, chosen in enumerate(state) if chosen == action]
            graph = makes(graph, stages) if stages else graph
        yield graph


def orders_of(graph: Graph, costs: Costs, stage: int, limit: float) -> Iterator[tuple[Pass, ...]]:
    """All orders of a rank with one stage within its limit; what is optional is done, or not."""
    change = costs.changes(graph, DEVICE)
    kinds = [task.kind for task in graph.needs if task.stage == stage]
    optional = [kind for kind in kinds if graph.kinds[kind].optional]
    for gone in itertools.product((False, True), repeat=FEW) if optional else [(False,) * FEW]:
        wanted = {
            Pass(kind, stage, i)
            for kind in kinds
            for i in range(FEW)
            if kind not in optional or gone[i]
        }
        whole = Schedule.of('all', PAIR, FEW, [sorted(wanted)], graph)
        needs = {
            p: {q for q in whole.predecessors(p) if q.stage == stage}
            | ({p._replace(microbatch=p.microbatch - 1)} if in_order(graph, p) else set())
            for p in wanted
        }
        todo: list[tuple[tuple[Pass, ...], float]] = [((), 0.0)]
        while todo:
            done, held = todo.pop()
            if len(done) == len(wanted):
                yield done
            for p in wanted.difference(done):
                after = held + change.get((p.kind, p.stage, 0), 0.0)
                if needs[p] <= set(done) and after <= limit + 1e-9:
                    todo.append(((*done, p), after))


def in_order(graph: Graph, p: Pass) -> bool:
    return graph.kinds[p.kind].in_order and p.microbatch > 0


def optimum_with_actions(
    costs: Costs, limits: tuple[float, float], actions: frozenset[str]
) -> tuple[float, float]:
    """The least makespan within the limits, and the least longest window."""
    best = [inf, inf]
    for graph in graphs(actions):
        both = [list(orders_of(graph, costs, rank, limits[rank])) for rank in range(2)]
        for passes in itertools.product(*both):
            schedule = Schedule.of('tried', PAIR, FEW, passes, graph)
            try:
                timeline = simulate(schedule, costs)
            except ScheduleError:
                continue
            values = timeline.makespan, max(timeline.windows)
            if any(value < known - 1e-9 for value, known in zip(values, best, strict=True)):
                held = peak(schedule, costs)
                if all(a <= b + 1e-9 for a, b in zip(held, limits, strict=True)):
                    best = [min(*both) for both in zip(values, best, strict=True)]
    return best[0], best[1]


def both_bounds(costs, limits, actions, placement=PAIR, m=FEW, objective='makespan'):
    free = Problem(placement, m, costs, (inf,) * placement.num_ranks, objective)
    problem = replace(free, limits=limits)
    return lower_bound(free), moving_bound(problem, [find(name) for name in actions])


@pytest.mark.parametrize('actions', [{'recompute'}, {'evict'}, {'recompute', 'evict'}])
@pytest.mark.parametrize(
    ('costs', 'limits'),
    [
        (costed(), (1.2, 1.2)),
        (costed(), (1.0, 2.0)),
        (costed(copy=3.0, again=2.0), (1.2, 2.0)),
        full(costed(times=(1.0, 1.5, 0.5), more=2.0, kept=0.5), (2.5, 3.0)),
        full(costed(times=(2.0, 1.0, 1.0), copy=0.0, again=0.5), (1.1, 3.0)),
    ],
)
def test_never_above_the_optimum(costs, limits, actions):
    for objective, best in zip(
        ('makespan', 'window'), optimum_with_actions(costs, limits, frozenset(actions)), strict=True
    ):
        bounds = both_bounds(costs, limits, frozenset(actions), objective=objective)
        assert max(bounds) <= best + 1e-9


def test_it_knows_the_limit():
    """Many microbatches under little memory: what is known without the limit is far below."""
    placement = Placement.loop(4)
    costs = costed(placement, copy=4.0, again=1.0)
    for actions in ({'recompute'}, {'offload'}, {'evict'}, {'offload', 'recompute', 'evict'}):
        free, bound = both_bounds(costs, (1.2,) * 4, frozenset(actions), placement, 32)
        assert bound > 1.1 * free, actions


@grid(limit=(1.0, 1.5, 2.0), placement=(Placement.loop(2), Placement.loop(3)), copy=(0.5, 1.5, 1.0))
def test_below_what_is_proven_with_offload(placement, limit, copy):
    """By the exact form, which proves its bound."""
    costs = costed(placement, copy=copy)
    m = 6 // placement.num_ranks + 1
    problem = Problem(placement, m, costs, (limit,) * placement.num_ranks)
    found = solve_offload(problem, 0.0, 100.0, effort=5.0, seconds=60.0)
    assert found.schedule is not None
    assert moving_bound(problem, [find('offload')]) <= found.bound + 1e-9


def test_partners_have_their_memory_together():
    """What a pair must hold all the time is no less for going from one to the other."""
    placement = Placement.loop(4)
    costs = costed(placement, copy=0.0)
    problem = Problem(placement, 16, costs, (1.0,) * 4)
    # the inner two begin at 1 and hold 7 and 5 of each microbatch, in 2 at once
    assert moving_bound(problem, [find('evict')]) == pytest.approx(1 + 16 * 12 / 2)
    assert moving_bound(problem, [find('offload')]) < 90
    costs = costed()
    assert moving_bound(Problem(PAIR, FEW, costs, (inf, inf)), [find('offload')]) == 0.0
