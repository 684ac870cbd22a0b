"""What the planner finds changes on purpose only: plans can be made again.

`plans.json` beside this file holds a hash of each answer, for stages that differ in all that costs
can say. Where one was changed on purpose, write it anew, look whether plans became better or worse
(`tests/unit/planner/test_plans.py --full`), and say why in the commit:

    PYTHONPATH=tests/support python tests/unit/planner/test_plans_stay.py
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from unittest.mock import patch

from stays import golden

from megatron_zbpp import Costs, Placement, build, simulate
from megatron_zbpp.planner import cp_sat, limits
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.planner.cp_sat import solve_offload
from megatron_zbpp.planner.ends import lower_bound, moving_bound, replay_whole
from megatron_zbpp.planner.pattern import Pattern, dispatch
from megatron_zbpp.planner.plans import joined, named, plan
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.planner.search import Search
from megatron_zbpp.techniques import NAMES, find

ACTIONS = NAMES
# Halves and quarters: releases of Python add them in different ways to the same sum.
TIMES = ((2.0, 3.0, 2.0), (3.0, 4.0, 1.0), (2.5, 2.0, 2.5), (1.5, 1.75, 1.0))
SHAPES = {
    'loop': (Placement.loop(3), 8),
    'loop of two chunks': (Placement.loop(3, 2), 9),
    'V': (Placement.v(3), 8),
    'wave': (Placement.wave(2, 4), 7),
    'V, many microbatches': (Placement.v(2), 36),
    'loop, many microbatches': (Placement.loop(4), 41),
}
# limits over what one microbatch of all stages takes
AMOUNTS = {'without a limit': inf, 'limited': 2.0, 'tight': 1.25}
# deterministic seconds of the exact solver; where that ends earlier, it has the optimum, or a proof
EFFORT = 0.25
CASES = [(shape, amount) for shape in SHAPES for amount in AMOUNTS]


def costs_of(placement: Placement) -> Costs:
    """Stages of four kinds in turn; links, ranks and memory that are not alike."""
    stages = range(placement.num_stages)
    forward, backward, weight = zip(*(TIMES[s % 4] for s in stages), strict=True)
    shares = tuple((1 + s % 3 / 4) / placement.num_chunks for s in stages)
    return Costs.of(
        forward,
        backward,
        weight,
        comm=0.25,
        activation=shares,
        retained=tuple(share * (1.5 if s % 2 else 0.5) for s, share in enumerate(shares)),
        edges=((0, 1, 0.75), (1, 0, 0.5)),
        speeds=(1.0, 0.5, *(1.0,) * (placement.num_ranks - 2)),
        together=0.875,
        times={**dict.fromkeys('OLEK', (1.5,) * len(stages)), 'R': forward},
        amounts={'input': tuple(share / 8 for share in shares)},
    )


def problem_of(shape: str, amount: str, objective: str = 'makespan') -> Problem:
    placement, m = SHAPES[shape]
    costs = costs_of(placement)
    held = [
        max(costs.amounts['activation'][s], costs.amounts['retained'][s])
        for s in range(placement.num_stages)
    ]
    limits = tuple(
        AMOUNTS[amount] * sum(held[stage] for stage in placement.stages(rank))
        for rank in range(placement.num_ranks)
    )
    return Problem(placement, m, costs, limits, objective)


def steps(number: int) -> limits.Budget:
    """Return a budget that no clock ends."""
    whole = limits.Budget(600.0)
    return whole.split_off(number / whole.steps)


def answers(shape: str, amount: str) -> Iterator[object]:
    """Yield what bounds and a search say; the exact solver says what is proven elsewhere."""
    problem = problem_of(shape, amount)
    window = replace(problem, objective='window')
    every = [find(name) for name in ACTIONS]
    bounds = [moving_bound(problem, [*every[:n], *every[n + 1 :]]) for n in range(4)]
    yield lower_bound(problem), lower_bound(window), bounds, moving_bound(window, every)
    known = named(problem)
    search = Search(problem, [known[0].orders] if known else [], 3)
    search.improve(steps(30_000))
    search.improve(steps(10_000))
    yield search.bound, search.solutions, search.done
    schedule = problem.schedule(search.best.orders, 'found')
    yield [(value, name) for value, name, *_ in joined(problem, schedule)]


def asked(times: float, objective: str) -> Iterator[object]:
    """Yield what the exact solver is asked, and what it says: a value, a bound, nothing better."""
    seen: list[str] = []
    interruptible = cp_sat.interruptible

    def solve(solver: object, model: object) -> object:
        seen.append(str(model))
        return interruptible(solver, model)

    for placement in (Placement.loop(2), Placement.v(2)):
        costs = costs_of(placement)
        kinds = [tuple(times * each for each in of) for of in (costs.times['F'], costs.times['B'])]
        costs = replace(costs.with_times(F=kinds[0], B=kinds[1]), together=1.0)
        limits = (2.25 / placement.num_chunks + 0.5, 2.5)
        problem = Problem(placement, 3, costs, limits, objective)
        orders = dispatch(problem, Pattern.random(problem, Random(1)))
        value, _ = replay_whole(problem, orders)
        bound = lower_bound(problem)
        with patch.object(cp_sat, 'interruptible', solve):
            best = cp_sat.solve(problem, orders, bound, value, EFFORT, 600.0)
            again = cp_sat.solve(problem, orders, bound, 0.75 * bound, EFFORT, 600.0)
        for each in (best, again):
            yield each.bound, each.overran, each.orders and replay_whole(problem, each.orders)[0]
        with patch.object(cp_sat, 'interruptible', solve):
            moved = solve_offload(problem, 0.0, value, EFFORT, 600.0)
            none = solve_offload(problem, 0.0, 0.5 * bound, EFFORT, 600.0)
        for each in (moved, none):
            made = each.schedule
            yield each.bound, each.overran, made and simulate(made, costs).makespan
    yield seen


def planned(objective: str) -> Iterator[object]:
    """Yield plans on several placements, with actions and without, with schedules to begin with."""
    placements = Placement.loop(3), Placement.v(3), Placement.loop(3, 2)
    candidates = [(placement, costs_of(placement)) for placement in placements]
    alone = [(placement, replace(costs, together=1.0)) for placement, costs in candidates]
    shared = {'objective': objective, 'seconds': 600.0, 'seed': 1}
    with patch.object(limits, '_STEPS_PER_SECOND', 100):
        for of, limit in itertools.product((candidates, alone), (None, 2.5, (2.5, 3.0, 3.5))):
            yield plan(of, 12, memory_limit=limit, **shared)
        starts = [build('v-half', 3, 12)]
        yield plan(candidates, 12, memory_limit=2.5, starts=starts, **shared)
        for actions in (ACTIONS, ACTIONS[:1], ACTIONS[1:]):
            yield plan_within(
                alone[:2], 12, actions=actions, memory_limit=1.75, starts=starts, **shared
            )


QUESTIONS: dict[str, Callable[[], Iterator[object]]] = {
    **{f'{shape}, {amount}': partial(answers, shape, amount) for shape, amount in CASES},
    'plans': partial(planned, 'makespan'),
    'plans of windows': partial(planned, 'window'),
    'exactly': partial(asked, 1.0, 'makespan'),
    'exactly, of windows': partial(asked, 1.0, 'window'),
    'exactly, of times without a unit': partial(asked, 2**0.5, 'window'),
}
test_plans_stay = golden(__name__, Path(__file__).with_name('plans.json'), QUESTIONS)
