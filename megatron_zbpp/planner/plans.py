"""The planner: the best order that can be found for measured costs under a memory limit.

It starts from every named schedule on the placements that are allowed, fused backwards split, so it
is never worse than the best of them; searches on from there (`search`); and on small problems asks
the exact solver, where it is installed, for the optimum or a proof. Time goes to the placements
that can still win. Where costs say what forwards and backwards take that run as one, what it has
found is compared with the same in such cells (`cells`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner import cp_sat
from megatron_zbpp.planner.budget import Budget, OnTime, always
from megatron_zbpp.planner.limits import Candidate, Graphs, Limit, activation_limits, with_room
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
    """Ctrl-C while planning.

    Attributes:
        best: the best plan by then.
    """

    def __init__(self, best: Plan) -> None:
        super().__init__()
        self.best = best


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
    """Return the best schedule found on any of the candidates.

    Args:
        candidates: placements that may be used, each with the costs of its stages.
        num_microbatches: m.
        memory_limit: most that a rank may hold, or one limit a rank, in the unit of
            `costs.amounts`; its parameters count.
        objective: 'makespan' while all ranks wait for each other between iterations; 'window',
            the longest span of one rank, where they do not.
        seconds: at most, but for the schedule to begin with and the check of the plan; turned into
            a number of steps, so that plans can be made again.
        spent: seconds of these that are over: the clock ends the search so much earlier.
        seed: another one searches elsewhere.
        starts: schedules of m microbatches to be at least as good as, where they keep the limit;
            those of another graph are left out.
        graph: of one microbatch, by the number of stages, such as
            `lambda stages: sliced(chain(stages), 2)`; default: F, B and W of each stage.
        progress: called now and then with the share of the budget that is spent.

    Raises:
        PlanningInterrupted: by Ctrl-C; it has the best plan by then.
        ValueError: no candidates, an unknown objective, a limit that no schedule can keep, or a
            graph with passes that the search cannot place.
    """
    require_question(candidates, objective)
    problems: list[Problem] = []
    for placement, costs in with_room(candidates, memory_limit, graph):
        limits = activation_limits(memory_limit, placement, costs)
        made = graph and graph(placement.num_stages)
        units = num_microbatches * (made.num_slices if made else 1)
        problems.append(Problem(placement, units, costs, limits, objective, made))
    whole = Budget(seconds, reserve=spent)
    in_time = always if _small(problems) else whole.on_time
    reserve = min((seconds - spent) / 2, _reserve(problems))
    budget = Budget(seconds, progress, reserve=spent + reserve)
    searches, names = _begun(problems, list(starts), seed, budget)
    try:
        _search([search for search in searches if search.solutions], budget)
    except KeyboardInterrupt:
        raise PlanningInterrupted(_made(searches, names, budget, in_time)) from None
    return _made(searches, names, budget, in_time)


def is_small(num_passes: int) -> bool:
    """Return whether all named schedules of so many passes are built within a second or so."""
    return num_passes <= _SMALL


def _small(problems: Sequence[Problem]) -> bool:
    return is_small(sum(problem.num_passes for problem in problems))


def _reserve(problems: Sequence[Problem]) -> float:
    """Return the seconds that the best plan of the problems takes once it is found."""
    cells = any(problem.costs.least_share != 1 for problem in problems)
    each = _CHECK * (_CELLS if cells else 1)
    return 0.0 if _small(problems) else each * max(problem.num_passes for problem in problems)


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
    schedule = best.problem.schedule(best.best.orders, 'planned')
    found = Joined(best.best.value, None, schedule, best.problem.costs)
    with_cells = [each for search in begun for each in _joined(search, in_time)]
    found = min(found, *with_cells, key=lambda each: each.value) if with_cells else found
    schedule = replace(found.schedule, name='planned', phases=())
    check(schedule)
    # cells take no less than this share of what their passes take one by one
    least = min(search.bound * search.problem.costs.least_share for search in searches)
    return Plan(
        schedule,
        found.costs,
        best.problem.objective,
        found.value,
        min(found.value, least),  # which rounding may cross
        _best(names, with_cells),
        not budget.overran,
    )


def _search(searches: list[Search], budget: Budget) -> None:
    for share in _ROUNDS if len(searches) > 1 else (1.0,):
        part = budget.split_off(share)
        ranked = sorted(searches, key=lambda search: (search.best.value, search.bound))
        for at, search in enumerate(ranked):
            best = min(search.best.value for search in searches)
            if search.bound < best - EPSILON and budget.on_time():
                rest = len(ranked) - at
                _improve(search, part.split_off(1 / rest if share < 1 else 1 / min(rest, 2)), best)


def _improve(search: Search, budget: Budget, best: float) -> None:
    """Search; where the problem is small, first briefly and then exactly for less than `best`."""
    if search.problem.num_passes <= _EXACT_PASSES and cp_sat.can_solve(search.problem):
        search.improve(budget.split_off(_BRIEF))
        if not search.done:
            _solve(search, budget.split_off(_EXACT), best)
    if search.bound < best - EPSILON:
        search.improve(budget)


def _solve(search: Search, budget: Budget, best: float) -> None:
    """Ask the exact solver for less than `best`, or a proof that there is none."""
    if not (budget.effort and budget.on_time()):
        return
    answer = cp_sat.solve(
        search.problem,
        search.best.orders,
        search.bound,
        enough=best,
        effort=budget.effort,
        seconds=budget.seconds,
    )
    budget.spend_effort(answer.effort, answer.overran)
    search.bound = answer.bound
    if answer.orders is not None:
        search.add(answer.orders)


def _joined(search: Search, in_time: OnTime) -> list[Joined]:
    schedule = search.problem.schedule(search.best.orders, 'planned')
    return list(joined(search.problem, schedule, in_time))


def _best(names: list[Named], with_cells: list[Joined]) -> tuple[str, float] | None:
    """Return name and value of the best."""
    found = [(entry.name, entry.value) for entry in names]
    found += [(entry.name, entry.value) for entry in with_cells if entry.name is not None]
    return min(found, key=lambda entry: entry[1], default=None)
