"""Bounds under a limit where activations move or are made again: below every optimum, by looking.

Of two ranks and two microbatches all orders are tried, with all that may be done of the actions.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from grids import grid

from megatron_zbpp import Costs, Pass, Placement, Schedule, ScheduleError, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import Graph, chain
from megatron_zbpp.ir.graph import DEVICE, HOST, PARTNER
from megatron_zbpp.planner.cp_sat import solve_offload
from megatron_zbpp.planner.ends import lower_bound, moving_bound
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.techniques import find
from megatron_zbpp.techniques.offload import offload
from megatron_zbpp.techniques.recompute import recompute

M = 2
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


def orders(graph: Graph, costs: Costs, stage: int, limit: float) -> Iterator[tuple[Pass, ...]]:
    """All orders of a rank with one stage within its limit; what is optional is done, or not."""
    change = costs.changes(graph, DEVICE)
    kinds = [task.kind for task in graph.needs if task.stage == stage]
    optional = [kind for kind in kinds if graph.kinds[kind].optional]
    for gone in itertools.product((False, True), repeat=M) if optional else [(False,) * M]:
        wanted = {
            Pass(kind, stage, i)
            for kind in kinds
            for i in range(M)
            if kind not in optional or gone[i]
        }
        whole = Schedule.of('all', PAIR, M, [sorted(wanted)], graph)
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


def optimum(
    costs: Costs, limits: tuple[float, float], actions: frozenset[str]
) -> tuple[float, float]:
    """The least makespan within the limits, and the least longest window."""
    best = [inf, inf]
    for graph in graphs(actions):
        both = [list(orders(graph, costs, rank, limits[rank])) for rank in range(2)]
        for passes in itertools.product(*both):
            schedule = Schedule.of('tried', PAIR, M, passes, graph)
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


def both_bounds(costs, limits, actions, placement=PAIR, m=M, objective='makespan'):
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
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (costed(times=(1.0, 1.5, 0.5), more=2.0, kept=0.5), (2.5, 3.0)),
                (costed(times=(2.0, 1.0, 1.0), copy=0.0, again=0.5), (1.1, 3.0)),
            )
        ),
    ],
)
def test_never_above_the_optimum(costs, limits, actions):
    for objective, best in zip(
        ('makespan', 'window'), optimum(costs, limits, frozenset(actions)), strict=True
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
    assert moving_bound(Problem(PAIR, M, costs, (inf, inf)), [find('offload')]) == 0.0
