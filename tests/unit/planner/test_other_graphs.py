"""The search places the passes of any graph, not of F, B and W alone: a queue is a row of it."""

from dataclasses import replace
from math import inf
from unittest.mock import patch

import pytest
from figures import require_kept

from megatron_zbpp import Costs, Placement, Schedule, check, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import Graph, Hold, Kind, Need, Task, chain
from megatron_zbpp.ir.graph import DEVICE
from megatron_zbpp.ir.techniques import made_of
from megatron_zbpp.planner import cp_sat
from megatron_zbpp.planner import limits as limits
from megatron_zbpp.planner.cp_sat import solve
from megatron_zbpp.planner.ends import latest, lower_bound, replay_whole
from megatron_zbpp.planner.pattern import Pattern, dispatch
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.planner.search import Search
from megatron_zbpp.techniques.offload import offload
from megatron_zbpp.techniques.recompute import recompute
from megatron_zbpp.techniques.slices.graph import sliced
from megatron_zbpp.techniques.updates.versions import updating
from megatron_zbpp.techniques.vocabulary.graph import split_vocabulary

M = 6


def scored(num_stages: int) -> Graph:
    """X scores what a stage has made by what the last one has; B needs the score.

    It has two inputs, of which one is a message, and memory and time of its own.
    """
    graph = chain(num_stages)
    needs, holds = dict(graph.needs), dict(graph.holds)
    for stage in range(num_stages - 1):
        own, backward = Task('X', stage), Task('B', stage)
        needs[own] = (Need(Task('F', stage)), Need(Task('F', num_stages - 1), 'target'))
        needs[backward] = (*needs[backward], Need(own))
        holds[own] = (Hold(DEVICE, 'score', 1),)
        holds[backward] = (*holds[backward], Hold(DEVICE, 'score', -1))
    return made_of(graph, 'scored', (), needs, holds, {'X': Kind('score')})


GRAPHS = {
    'slices': lambda stages: sliced(chain(stages), 2),
    'a pass of two inputs': scored,
    'shards of the vocabulary': lambda stages: split_vocabulary(chain(stages), 3),
    'forwards again': lambda stages: recompute(chain(stages), range(stages)),
    'an update a microbatch': lambda stages: updating(chain(stages)),
}
PLACEMENTS = {'loop': Placement.loop(3), 'V': Placement.v(3)}


def costs_of(placement: Placement) -> Costs:
    """Stages that differ, and links; shards stand behind the stages."""
    stages = range(placement.num_stages)
    uneven = [1 + stage % 3 / 4 for stage in stages]
    behind = [0.0] * len(stages) + [0.5] * placement.num_ranks
    return Costs.of(
        uneven,
        [1.25 * each for each in uneven],
        [0.75 * each for each in uneven],
        comm=0.25,
        activation=[each / 2 for each in uneven],
        retained=[0.75 * each for each in uneven],  # W holds more than F: a B raises what is held
        times={'X': (0.5,) * len(stages), 'S': behind, 'T': behind, 'U': (0.25,) * len(stages)},
        amounts={'score': (0.5,) * len(stages), 'logits': behind, 'input': (0.125,) * len(stages)},
    )


def list_schedule(problem: Problem) -> Schedule:
    """What may start first does, of these what is furthest in its microbatch."""
    depth = {queue: at for at, queue in enumerate(problem.in_turn)}
    ends: list[list[float]] = [[] for _ in problem.tasks]
    clocks = [0.0] * problem.placement.num_ranks
    orders: list[list[int]] = [[] for _ in clocks]

    def start(queue: int) -> float:
        return max(
            clocks[problem.ranks[queue]], latest(problem.awaited[queue], len(ends[queue]), ends)
        )

    for _ in range(problem.num_passes):
        todo = [q for q, own in enumerate(ends) if len(own) < problem.num_microbatches]
        queue = min(todo, key=lambda q: (start(q), -depth[q]))
        rank = problem.ranks[queue]
        orders[rank].append(queue)
        clocks[rank] = start(queue) + problem.durations[queue]
        ends[queue].append(clocks[rank])
    return problem.schedule(orders, 'list')


def least(problem: Problem) -> float:
    """The most that a rank holds where one microbatch is in flight."""
    one = replace(problem, num_microbatches=problem.slices)
    alone = one.schedule(
        [[q for q in own for _ in range(one.slices)] for own in one.turns], 'alone'
    )
    check(alone)
    return max(peak(alone, problem.costs))


@pytest.mark.parametrize('where', PLACEMENTS)
@pytest.mark.parametrize('what', GRAPHS)
def test_passes_of_other_kinds_are_planned(what, where):
    """Checked, no worse than list scheduling, and within a limit as tight as any."""
    placement, graph = PLACEMENTS[where], GRAPHS[what]
    costs = costs_of(placement)
    made = graph(placement.num_stages)
    problem = Problem(placement, M * made.num_slices, costs, (inf,) * 3, graph=made)
    greedy = list_schedule(problem)
    check(greedy)
    with patch.object(limits, '_STEPS_PER_SECOND', 200):
        found = plan([(placement, costs)], M, graph=graph, seconds=60.0)
        tight = least(problem)
        limited = plan([(placement, costs)], M, graph=graph, memory_limit=tight, seconds=10.0)
    assert found.value <= simulate(greedy, costs).makespan + 1e-9
    for each, limit in ((found, None), (limited, tight)):
        require_kept(each, limit)
        assert each.schedule.graph == problem.graph
        assert each.best_named is None or what == 'slices', 'none has passes of other kinds'
    with pytest.raises(ValueError, match=r'of rank . is below .*, one microbatch: give at least'):
        plan([(placement, costs)], M, graph=graph, memory_limit=0.9 * tight, seconds=1.0)


def test_the_exact_solver_knows_other_passes():
    """Of few passes it proves what the search has found, or finds better."""
    pytest.importorskip('ortools')
    placement = Placement.loop(2)
    problem = Problem(placement, 2, Costs.uniform(placement), (inf, inf), graph=scored(2))
    problem = Problem(
        placement, 2, problem.costs.with_times(X=(2.0, 0.0)), (inf, inf), graph=problem.graph
    )
    orders = dispatch(problem, Pattern.straight(problem, 4.0, 4.0, inf))
    value, _ = replay_whole(problem, orders)
    answer = solve(problem, orders, lower_bound(problem), value, 5.0, 60.0)
    assert answer.orders is not None
    best, _ = replay_whole(problem, answer.orders)
    assert answer.bound == best <= value
    check(problem.schedule(answer.orders, 'exact'))
    assert not cp_sat.can_solve(Problem(placement, 2, problem.costs, (4.0, 4.0), graph=scored(2)))


def test_copies_are_not_placed():
    """Either of the two is told of."""
    candidates = [(Placement.loop(2), Costs.uniform(Placement.loop(2)))]
    with pytest.raises(ValueError, match=r'and [OL] \(.*\) does not: plan without it'):
        plan(candidates, M, graph=lambda stages: offload(chain(stages), (0,)), seconds=0.1)


def test_windows_need_a_known_beginning():
    """They do where all that a rank does comes behind one pass."""
    placement = Placement.loop(2)
    costs = [(placement, Costs.uniform(placement))]

    def ahead(stages: int) -> Graph:
        """Y of the last stage needs nothing."""
        graph = chain(stages)
        needs = {**graph.needs, Task('Y', stages - 1): ()}
        holds = {**graph.holds, Task('Y', stages - 1): ()}
        return made_of(graph, 'ahead', (), needs, holds, {'Y': Kind('of its own')})

    with pytest.raises(ValueError, match="what rank 1 begins with: plan by objective='makespan'"):
        plan(costs, M, graph=ahead, objective='window', seconds=0.1)
    found = plan(costs, M, graph=GRAPHS['slices'], objective='window', seconds=0.1)
    assert found.value == pytest.approx(max(simulate(found.schedule, costs[0][1]).windows))


@pytest.mark.parametrize(('name', 'more'), [('slices', 0), ('shards of the vocabulary', 8)])
def test_steps_are_charged_by_inputs(name, more):
    """A replay of shards looks at what all ranks have made of a microbatch."""
    placement = PLACEMENTS['loop']
    graph = GRAPHS[name](placement.num_stages)
    problem = Problem(placement, M * graph.num_slices, costs_of(placement), (inf,) * 3, graph=graph)
    assert problem.num_steps == problem.num_passes + problem.num_microbatches * more
    charged, charge = set(), limits.Budget.charge
    with patch.object(
        limits.Budget, 'charge', lambda self, steps: charged.add(steps) or charge(self, steps)
    ):
        start = dispatch(problem, Pattern.straight(problem, 0.0, 0.0, inf))
        Search(problem, [start], 0).improve(limits.Budget(0.02))
    assert {2 * problem.with_fewer_microbatches.num_steps} < charged
    assert 6 + problem.num_steps / 20 in charged
