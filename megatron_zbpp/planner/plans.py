"""The planner: the best order that can be found for measured costs under a memory limit.

It starts from every named schedule on the placements that are allowed, fused backwards split, so it
is never worse than the best of them; searches on from there (`search`); and on small problems asks
the exact solver, where it is installed, for the optimum or a proof. Time goes to the placements
that can still win. Where costs say what forwards and backwards take that run as one, what it has
found is compared with the same in such cells (`named_schedules.joined`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner import cp_sat
from megatron_zbpp.planner.limits import (
    Budget,
    Candidate,
    Graphs,
    Limit,
    OnTime,
    always,
    question,
    with_room,
)
from megatron_zbpp.planner.named_schedules import Joined, Named, joined, named
from megatron_zbpp.planner.pattern import Pattern, dispatch, grouped
from megatron_zbpp.planner.problem import EPSILON, OBJECTIVES, Problem
from megatron_zbpp.planner.search import Search

_EXACT_PASSES = 4 * 8 * 2 * 3  # p, m, chunks, kinds: the exact solver ends in time up to here
_BRIEF = 0.05  # share of the time that is searched before
_EXACT = 0.8  # and of what is left then, that it gets
_ROUNDS = (0.25, 1.0)  # shares of the time that is left when each begins
_SMALL = 10_000  # passes of all placements: up to here, the clock ends no building of schedules
_CHECK = 2e-5  # seconds for each pass of a plan that is checked
_CELLS = 10  # times that, where costs say what forwards and backwards take that run as one


@dataclass(frozen=True)
class Plan:
    """A schedule that was searched for."""

    schedule: Schedule  # checked
    costs: Costs  # that it was planned for
    objective: str  # 'makespan' or 'window'
    value: float  # what it takes by `objective`, in the unit of `costs`
    lower_bound: float  # no schedule on the allowed placements takes less
    # the best named schedule that fits, and its value; None if none fits
    best_named: tuple[str, float] | None
    repeats: bool  # whether the same inputs give the same plan again; not if the clock cut it short

    @property
    def gap(self) -> float:
        """The most that the value may be above the optimum, as a share of the bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def as_good_as(self) -> str | None:
        """The name of a schedule that takes no more than this; None: it beats all that fit."""
        name, value = self.best_named or (None, inf)
        return name if value <= self.value + EPSILON else None


class PlanningInterrupted(KeyboardInterrupt):
    """Ctrl-C while planning."""

    def __init__(self, best: Plan) -> None:
        super().__init__()
        self.best = best  # plan by then


def plan(
    candidates: Sequence[Candidate],
    num_microbatches: int,
    *,
    memory_limit: Limit = None,
    objective: str = 'makespan',
    seconds: float = 20.0,
    spent: float = 0.0,
    seed: int = 0,
    starts: Iterable[Schedule] = (),
    graph: Graphs | None = None,
    progress: Callable[[float], None] | None = None,
) -> Plan:
    """Return the best schedule found on any of the candidates: see `megatron_zbpp.plan`.

    Seconds are turned into a number of steps, so that plans can be made again; where `spent` of
    them are over, the clock ends the search so much earlier. Of `starts` those of another graph are
    left out. Ctrl-C raises PlanningInterrupted.
    """
    require_question(candidates, objective)
    problems = [
        question(each, num_microbatches, memory_limit, objective, graph)
        for each in with_room(candidates, memory_limit, graph)
    ]
    whole = Budget(seconds, reserve=spent)
    in_time = always
    reserve = 0.0  # seconds that the best plan takes once it is found
    if not _small(problems):
        in_time = whole.on_time
        cells = any(problem.costs.least_share != 1 for problem in problems)
        each = _CHECK * (_CELLS if cells else 1)
        reserve = each * max(problem.num_passes for problem in problems)
    budget = Budget(seconds, progress, reserve=spent + min((seconds - spent) / 2, reserve))
    searches, names = _begun(problems, list(starts), seed, budget)
    try:
        _search([search for search in searches if search.solutions], budget)
    except KeyboardInterrupt:
        raise PlanningInterrupted(_made(searches, names, budget, in_time)) from None
    return _made(searches, names, budget, in_time)


def is_small(num_passes: int) -> bool:
    """Return True for so few passes that all named schedules are built within a second or so."""
    return num_passes <= _SMALL


def _small(problems: Sequence[Problem]) -> bool:
    return is_small(sum(problem.num_passes for problem in problems))


def _begun(
    problems: Sequence[Problem], starts: Sequence[Schedule], seed: int, budget: Budget
) -> tuple[list[Search], list[Named]]:
    """Return a search on each problem, and the named schedules that they begin with."""
    searches: list[Search] = []
    names: list[Named] = []
    for at, problem in enumerate(problems):
        small = _small(problems)
        turn = always if small else budget.turn(1 / (len(problems) - at))
        known = named(problem, turn)
        names += known
        given = [problem.orders(s) for s in starts if problem.has(s)]
        starts_here = [*(entry.orders for entry in known), *grouped(problem, turn), *given]
        needed = small or not (starts_here or any(each.solutions for each in searches))
        if not problem.is_plain and (needed or turn()):
            starts_here.append(dispatch(problem, Pattern.straight(problem, 0.0, 0.0, inf)))
        searches.append(Search(problem, starts_here, seed, always if needed else turn))
    return searches, names


def require_question(candidates: Sequence[Candidate], objective: str) -> None:
    """Raise ValueError where there is nothing to plan on, or the objective is unknown."""
    if not candidates:
        raise ValueError('no placement to plan on: allow at least one')
    if objective not in OBJECTIVES:
        raise ValueError(f'objective {objective!r} is unknown: use {" or ".join(OBJECTIVES)}')


def _made(searches: list[Search], names: list[Named], budget: Budget, in_time: OnTime) -> Plan:
    """Return the best of all searches, with cells where they make it shorter."""
    begun = [search for search in searches if search.solutions]
    best = min(begun, key=lambda search: search.best.value)
    with_cells: list[Joined] = []
    for search in begun:
        problem, schedule = search.problem, search.problem.schedule(search.best.orders, 'planned')
        with_cells += joined(problem, schedule, in_time)
    schedule = best.problem.schedule(best.best.orders, 'planned')
    found = Joined(best.best.value, None, schedule, best.problem.costs)
    found = min([found, *with_cells], key=lambda each: each.value)
    schedule = replace(found.schedule, name='planned', phases=())
    check(schedule)
    named = [(each.name, each.value) for each in (*names, *with_cells) if each.name is not None]
    # cells take no less than this share of what their passes take one by one
    least = min(search.bound * search.problem.costs.least_share for search in searches)
    return Plan(
        schedule,
        found.costs,
        best.problem.objective,
        found.value,
        min(found.value, least),  # which rounding may cross
        min(named, key=lambda entry: entry[1], default=None),
        not budget.overran,
    )


def _search(searches: list[Search], budget: Budget) -> None:
    for share in _ROUNDS if len(searches) > 1 else (1.0,):
        part = budget.split_off(share)
        ranked = sorted(searches, key=lambda search: (search.best.value, search.bound))
        for at, search in enumerate(ranked):
            best = min(search.best.value for search in searches)
            if search.bound >= best - EPSILON or not budget.on_time():
                continue
            rest = len(ranked) - at
            own = part.split_off(1 / rest if share < 1 else 1 / min(rest, 2))
            # where the problem is small, first briefly and then exactly for less than the best
            if search.problem.num_passes <= _EXACT_PASSES and cp_sat.can_solve(search.problem):
                search.improve(own.split_off(_BRIEF))
                exact = own.split_off(_EXACT)
                if not search.done and exact.effort and exact.on_time():
                    answer = search.solve(best, exact.effort, exact.seconds)
                    exact.spend_effort(answer.effort, answer.overran)
            if search.bound < best - EPSILON:
                search.improve(own)
