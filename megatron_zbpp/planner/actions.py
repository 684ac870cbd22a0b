"""One search over orders and over what is done with activations, stage by stage.

What a stage saves between F and B is kept, or a technique takes it: it goes to the host or to the
partner, or is made again. What passes cost with another setting of the whole model, such as
Megatron's selective recomputation, are further candidates on the same placements. Orders to begin
with are the named schedules and what the planner finds under several limits above the one that is
asked for; each is rated with its actions by the simulator, copy engines included, and its memory by
its order alone. From the best of them on, actions of single stages are changed. (AdaPipe, ASPLOS
2024, chooses recomputation per stage so, for 1F1B; OptPipe, arXiv 2510.05186, asks for orders and
offloads at once.) Named schedules that move activations take part as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.schedule import ScheduleError
from megatron_zbpp.planner.cp_sat import available
from megatron_zbpp.planner.ends import lower_bound, moving_bound
from megatron_zbpp.planner.limits import (
    Budget,
    Candidate,
    Graphs,
    Limit,
    activation_limits,
    always,
    question,
    said,
    same_limits,
    with_room,
)
from megatron_zbpp.planner.plans import (
    Plan,
    PlanningInterrupted,
    in_turn,
    is_small,
    plan,
    require_question,
    variants,
)
from megatron_zbpp.planner.problem import EPSILON, Problem
from megatron_zbpp.schedules import FAMILIES
from megatron_zbpp.techniques import find_all, placed_in_turn
from megatron_zbpp.techniques.base import Technique
from megatron_zbpp.techniques.composition import SLICED, techniques_of
from megatron_zbpp.techniques.slices.graph import sizes_of

_KEEP = 'keep'

_EXACT_PASSES = 4 * 8 * 3  # p, m, kinds: the exact solver ends in time up to here
_POOL = 6  # what is changed at once
_STEPS = 12  # that a pass of a rated schedule costs, of a budget's
_ROUNDING = 1 + 1e-9

State = tuple[str, ...]  # per stage, what is done with its activations


@dataclass(frozen=True)
class Rated:
    """A schedule with actions, and how good it is."""

    excess: float  # what ranks hold above their limits, in all
    value: float  # what it takes by the objective
    schedule: Schedule  # with its passes that move or make again
    base: Schedule  # without
    state: State  # the actions; empty: all are kept, but for what the base itself does
    name: str | None  # of the family, where it is as that has it
    candidate: int  # number of its placement

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key of plans: within limits by time, else by what is too much."""
        return self.excess, self.value


class ActionSearch:
    """The state of a search: the best plan so far, and bounds."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        num_microbatches: int,
        limit: Limit,
        objective: str,
        actions: Sequence[Technique],
        graph: Graphs | None = None,
    ) -> None:
        self.best: Rated | None = None  # of those that keep the limits
        self._actions = actions
        self._objective = objective
        self._exact = actions[0].exact if len(actions) == 1 else ''
        self._limits = [activation_limits(limit, at, costs) for at, costs in candidates]
        self._problems = [
            question(each, num_microbatches, None, objective, graph) for each in candidates
        ]
        self._bounds = [
            _bound(problem, limits, actions)
            for problem, limits in zip(self._problems, self._limits, strict=True)
        ]
        self._pool: list[Rated] = []
        self._least: float | None = None
        self._limit = limit
        self._named: list[tuple[str, float]] = []
        self._seen: set[tuple[int, State, int]] = set()
        self._todo: list[tuple[Schedule, State, int]] = []
        self._choices = (_KEEP, *(technique.name for technique in actions))

    def start(self, schedule: Schedule, name: str | None = None) -> None:
        """Rate a schedule as it is; if it has no actions of its own, `climb` gives it some."""
        cut = schedule.graph.num_slices, sizes_of(schedule.graph)
        for at, problem in enumerate(self._problems):
            own = problem.slices, sizes_of(problem.graph) if problem.graph else ()
            if problem.placement == schedule.placement and own == cut:
                new = self._rate(schedule, (), at, name)
                if new is not None and problem.has(schedule):
                    self._todo += [(schedule, state, at) for state in self._states(schedule)]

    @property
    def is_small(self) -> bool:
        """True where all families are rated in a moment."""
        return is_small(sum(problem.num_passes for problem in self._problems))

    def start_named(self, budget: Budget | None = None) -> None:
        """Rate all families; those that move activations also as techniques make variants."""
        for at, problem in enumerate(self._problems):
            on_time = budget.turn(1 / (len(self._problems) - at)) if budget else always
            limited = replace(problem, limits=self._limits[at])
            families = in_turn(limited) if budget else FAMILIES
            for family in itertools.takewhile(lambda _, asked=on_time: asked(), families):
                of_costs = [problem.costs]  # to plan named schedules by
                if family.moves:
                    few = min(
                        problem.num_microbatches, problem.placement.num_ranks * problem.slices
                    )
                    short = next(variants(family, replace(problem, num_microbatches=few)), None)
                    if short is None or not self._allowed(short):
                        continue
                    of_costs += [c for each in self._actions for c in each.variants(problem.costs)]
                label = family.label(problem.placement.num_chunks)
                for costs in of_costs:
                    for schedule in variants(family, replace(problem, costs=costs)):
                        if self._allowed(schedule):
                            self.start(schedule, label if costs == problem.costs else None)

    def climb(self, budget: Budget, rng: Random) -> None:
        """Try whole chunks, then change actions of the best, a stage or a chunk at a time."""
        while self._todo or (self._pool and len(self._choices) > 1):
            if self._todo:
                base, state, at = self._todo.pop(0)
            else:
                old = self._pool[min(int(rng.expovariate(0.7)), len(self._pool) - 1)]
                base, state, at = old.base, self._changed(old, rng), old.candidate
            if not budget.charge(_STEPS * sum(map(len, base.passes))):
                return
            new = self._rate(base, state, at)
            if new is not None:
                self._pool = sorted([*self._pool, new], key=lambda rated: rated.rank)[:_POOL]

    def solve(self, budget: Budget) -> None:
        """Ask the exact solver, where it is installed and the question small enough for it."""
        if not (self._exact and available()):
            return
        small = [
            at
            for at, problem in enumerate(self._problems)
            if problem.slices == 1
            and problem.num_passes <= _EXACT_PASSES
            and min(problem.durations) > 0
        ]
        for done, at in enumerate(small):
            part, known = budget.split_off(1 / (len(small) - done)), self.best
            if known is None or not part.effort or self._bounds[at] >= known.value - EPSILON:
                continue
            problem = replace(self._problems[at], limits=self._limits[at])
            module, _, name = self._exact.partition(':')
            solve = getattr(importlib.import_module(module), name)
            answer = solve(problem, self._bounds[at], known.value, part.effort, part.seconds)
            part.spend_effort(answer.effort, answer.overran)
            self._bounds[at] = answer.bound
            if answer.schedule is not None:
                self._rate(answer.schedule, (), at)

    def made(self, repeats: bool) -> Plan:
        """Return the plan of the best."""
        best = self.best
        if best is None:
            if self._least is None:
                text = (
                    'no schedule is known for such ranks and microbatches: allow other placements'
                )
            else:
                needed = said(self._least, self._limit)
                text = (
                    f'nothing found keeps the memory limit: all that is known needs {needed} or '
                    'more: give that, or allow more actions or chunks'
                )
            raise ValueError(text + ('' if repeats else ', or more seconds'))
        named = min(self._named, key=lambda entry: entry[1], default=None)
        costs = self._problems[best.candidate].costs
        schedule = replace(best.schedule, name='planned', phases=())
        bound = min(best.value, *self._bounds)
        return Plan(schedule, costs, self._objective, best.value, bound, named, repeats)

    def _allowed(self, schedule: Schedule) -> bool:
        return techniques_of(schedule) <= {*self._choices, SLICED}

    def _states(self, schedule: Schedule) -> Iterator[State]:
        placement = schedule.placement
        chunks = range(1, placement.num_chunks + 1)
        for action, count in itertools.product(self._choices[1:], chunks):
            yield tuple(
                action if placement.chunk_of(stage) < count else _KEEP
                for stage in range(placement.num_stages)
            )

    def _changed(self, old: Rated, rng: Random) -> State:
        placement, state = old.base.placement, list(old.state)
        stage, action = rng.randrange(len(state)), rng.choice(self._choices)
        along = rng.random() < 0.25
        for other in range(len(state)):
            if other == stage or (along and placement.chunk_of(other) == placement.chunk_of(stage)):
                state[other] = action
        return tuple(state)

    def _rate(self, base: Schedule, state: State, at: int, name: str | None = None) -> Rated | None:
        """Rate a base with actions once, and remember it where it is good."""
        if (key := (hash(base), state, at)) in self._seen:
            return None
        self._seen.add(key)
        problem = self._problems[at]
        try:
            schedule = base
            for technique in placed_in_turn(self._actions):
                stages = [stage for stage, action in enumerate(state) if action == technique.name]
                if stages:
                    schedule = technique.place(schedule, stages, problem.costs, self._limits[at])
            timeline = simulate(schedule, problem.costs)
        except ScheduleError:  # its copies wait for each other
            return None
        value = timeline.value(self._objective)
        held, limits = peak(schedule, problem.costs), self._limits[at]
        pairs = list(zip(held, limits, strict=True))
        excess = sum(max(0.0, most - limit * _ROUNDING) for most, limit in pairs)
        rated = Rated(excess, value, schedule, base, state, name, at)
        static = problem.costs.static(problem.placement)
        needed = max(a + b for a, b in zip(held, static, strict=True))
        self._least = min(needed, needed if self._least is None else self._least)
        if not excess and name is not None:
            self._named.append((name, value))
        if not excess and (self.best is None or value < self.best.value - EPSILON):
            with contextlib.suppress(ScheduleError):  # it may not run
                check(schedule)
                self.best = rated
        return rated


def _bound(problem: Problem, limits: Sequence[float], actions: Sequence[Technique]) -> float:
    """Return a value that nothing is below; that of memory is known of whole sequences."""
    least = lower_bound(problem)
    if problem.slices == 1:
        least = max(least, moving_bound(replace(problem, limits=tuple(limits)), actions))
    return least * problem.costs.least_share  # of which passes that run as one take as much


_ABOVE = (1.0, 1.5, 2.0, 3.0, inf)  # limits of the orders to begin with, over the one asked for
_ORDERS = 0.5  # share of the time that these get
_OTHERS = 0.25  # of slices: that of orders under higher limits
_NAMED = 0.5  # of the rest, the most that named schedules get where they take long
_BRIEF = 0.3  # of what is left, that is searched before
_EXACT = 0.8  # and of what is left then, that the exact solver gets, where it can do it


def plan_within(
    candidates: Sequence[Candidate],
    num_microbatches: int,
    *,
    actions: Collection[str] = (),
    memory_limit: Limit = None,
    objective: str = 'makespan',
    seconds: float = 20.0,
    seed: int = 0,
    starts: Iterable[Schedule] = (),
    graph: Graphs | None = None,
    progress: Callable[[float], None] | None = None,
) -> Plan:
    """Return the best schedule found, in which activations may be elsewhere between F and B.

    Arguments are those of `plan`. Costs of candidates have those of `actions`, names of the
    techniques that are allowed; with them, `graph` is that of slices, or none.
    """
    plain = partial(plan, candidates, num_microbatches, objective=objective, seed=seed, graph=graph)
    if not actions or memory_limit is None:
        return plain(memory_limit=memory_limit, seconds=seconds, starts=starts, progress=progress)
    require_question(candidates, objective)
    techniques = find_all(actions)
    for technique, (_, costs) in itertools.product(techniques, candidates):
        if lack := technique.lacks(costs):
            raise ValueError(f'{technique.name}, but {lack}')
    search = ActionSearch(candidates, num_microbatches, memory_limit, objective, techniques, graph)
    rest = 1 - _ORDERS - (_OTHERS if graph is not None else 0)
    whole, length, repeats = Budget(seconds, progress), seconds * rest, True

    def tell(_: float) -> None:
        whole.on_time()  # reports the share of the whole time

    try:
        for schedule in starts:
            search.start(schedule)
        if search.is_small:
            search.start_named()
        else:
            naming = Budget(length * _NAMED, tell)
            search.start_named(naming)
            repeats = not naming.overran
        shares = [_ORDERS / len(_ABOVE)] * len(_ABOVE)
        if graph is not None:  # orders of slices take longer to find, and fewer need actions
            shares = [_ORDERS, *[_OTHERS / len(_ABOVE)] * (len(_ABOVE) - 1)]
        limits = same_limits(memory_limit, candidates[0][0].num_ranks)
        for share, above in zip(shares, _ABOVE, strict=True):
            higher = [above * amount if above < inf else inf for amount in limits]
            try:
                with_room(candidates, higher, graph)
            except ValueError:
                continue
            found = plain(memory_limit=higher, seconds=seconds * share, progress=tell)
            search.start(found.schedule)
            repeats = repeats and found.repeats
        late = 0.0 if search.is_small else length - whole.seconds
        budget = Budget(length, tell, reserve=max(late, 0.0))
        search.climb(budget.split_off(_BRIEF), Random(seed))
        search.solve(budget.split_off(_EXACT))
        search.climb(budget, Random(seed + 1))
    except KeyboardInterrupt:
        if search.best is None:
            raise KeyboardInterrupt from None  # what it has is above the limit
        raise PlanningInterrupted(search.made(repeats=False)) from None
    return search.made(repeats and not budget.overran)
