"""The planner: the best order that can be found for measured costs under a memory limit.

It starts from every named schedule on the placements that are allowed, fused backwards split, so it
is never worse than the best of them; searches on from there (`search`); and on small problems asks
the exact solver, where it is installed, for the optimum or a proof. Time goes to the placements
that can still win. Where costs say what forwards and backwards take that run as one, what it has
found is compared with the same in such cells (`joined`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW, B, F, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.schedule import ScheduleError
from megatron_zbpp.planner import cp_sat
from megatron_zbpp.planner.ends import replay
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
from megatron_zbpp.planner.pattern import Pattern, dispatch, grouped
from megatron_zbpp.planner.problem import EPSILON, OBJECTIVES, Orders, Problem
from megatron_zbpp.planner.search import Search
from megatron_zbpp.schedules import FAMILIES, Family
from megatron_zbpp.schedules.registry import Sizes
from megatron_zbpp.techniques.slices.place import in_slices

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


@dataclass(frozen=True)
class Named:
    """Name of a schedule, with its chunks unless they are its default, its value and its orders."""

    name: str
    value: float
    orders: Orders


def named(problem: Problem, on_time: OnTime = always) -> list[Named]:
    """Return the named schedules on the problem's placement and within its limits, best first.

    `on_time` is asked before each family, the most promising first: see `in_turn`.
    """
    found: dict[str, list[Named]] = {}
    for family in in_turn(problem) if problem.is_plain else ():
        if family.moves:
            continue  # what a copy takes is no part of the problem
        if not on_time():
            break
        for schedule in variants(family, problem):
            orders = problem.orders(schedule)
            result = replay(problem, orders) if problem.fits(orders) else None
            if result is not None:
                name = family.label(problem.placement.num_chunks)
                found.setdefault(family.name, []).append(Named(name, result[0], orders))
    in_order = (entry for family in FAMILIES for entry in found.get(family.name, ()))
    return sorted(in_order, key=lambda entry: entry.value)


def in_turn(problem: Problem) -> list[Family]:
    """Return the families in the order to build them in, where there may be no time for all.

    Those that stay within the limits by their formula come first, those that look for their order
    by times last among them, as that takes long, and the smallest bubble before others.
    """
    placement = problem.placement
    sizes = Sizes(placement.num_ranks, problem.num_microbatches, placement.num_chunks)
    activation = problem.costs.amounts['activation']
    held = (sum(activation[s] for s in placement.stages(r)) for r in range(placement.num_ranks))
    room = min(most / own if own else inf for most, own in zip(problem.limits, held, strict=True))

    def turn(family: Family) -> tuple[bool, bool, float]:
        above = family.memory is not None and family.memory(sizes) > room * (1 + 1e-9)
        bubble = family.bubble(sizes) if family.bubble else inf
        return above, 'costs' in family.options, bubble

    return sorted(FAMILIES, key=turn)


def variants(family: Family, problem: Problem) -> Iterator[Schedule]:
    """Yield what the family can do on the problem's placement: as it is, and under the limit."""
    limit = min(problem.limits)
    adapts = 'memory_limit' in family.options and limit < inf
    costs = problem.costs if 'costs' in family.options else None
    m, n = problem.num_microbatches // problem.slices, problem.slices
    for within in (None, limit) if adapts else (None,):
        found = on_placement(family, problem.placement, m, costs, within, num_slices=n)
        if found is not None:
            yield found


def on_placement(
    family: Family,
    placement: Placement,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    together: bool = False,
    num_slices: int = 1,
) -> Schedule | None:
    """Return a family's schedule on a placement, as `build` does, in slices of each sequence.

    It is mirrored where the placement is: rank r is then rank p-1-r of the family's. None: the
    family has none there, or within that limit.
    """
    options: dict[str, Any] = {'num_chunks': placement.num_chunks, 'memory_limit': memory_limit}
    for m in (1, num_microbatches):  # the first tells the placement, at little expense
        try:
            found = in_slices(
                family.name,
                placement.num_ranks,
                m,
                num_slices,
                costs=costs,
                together=together,
                **options,
            )
        except ValueError:
            return None
        if placement not in (found.placement, found.placement.reversed()):
            return None
    return found if found.placement == placement else found.reversed()


class Joined(NamedTuple):
    """A schedule with cells, its value and its costs; `name` is its family, None a search's."""

    value: float
    name: str | None
    schedule: Schedule
    costs: Costs


def joined(problem: Problem, found: Schedule, on_time: OnTime = always) -> Iterator[Joined]:
    """Yield schedules with cells that the problem allows; none where costs say that hides nothing.

    `found` is the best schedule without cells; `on_time` is asked before each named schedule.
    """
    if problem.costs.least_share == 1 or not problem.is_plain or problem.slices > 1:
        return
    for name, schedule in _with_cells(problem, found, on_time):
        held = peak(schedule, problem.costs)
        fits = all(amount <= limit for amount, limit in zip(held, problem.limits, strict=True))
        if not schedule.together or not fits:
            continue
        try:
            timeline = simulate(schedule, problem.costs)
        except ScheduleError:  # a cell waits for what comes of itself
            continue
        yield Joined(timeline.value(problem.objective), name, schedule, problem.costs)


def _with_cells(
    problem: Problem, found: Schedule, on_time: OnTime
) -> Iterator[tuple[str | None, Schedule]]:
    """Yield a schedule with cells in it, then the families that have cells, where they can be."""
    for first, second in ((F, B), (B, F)):
        kinds = ((first, second), (BW if first == B else first, BW if second == B else second))
        cells: set[tuple[int, int]] = set()
        for rank, order in enumerate(found.passes):
            for at, (one, other) in enumerate(itertools.pairwise(order)):
                apart = one.microbatch != other.microbatch
                if (one.kind, other.kind) in kinds and apart and (rank, at - 1) not in cells:
                    cells.add((rank, at))
        yield None, replace(found, together=frozenset(cells))
    placement = problem.placement
    for family in FAMILIES:
        if not on_time():
            return
        own = on_placement(family, placement, problem.num_microbatches, together=True)
        if own is not None:
            yield family.label(placement.num_chunks), own
