"""The exact solver: optima of small instances, proven, with OR-tools CP-SAT.

One interval a pass; passes of a queue, and of a microbatch, in their order; passes of a rank never
at once; activations within the limit. Two things make it fast enough for p = 4, m = 8: it starts
from the search's best orders and bound, and where two stages of a rank have equal W, their Ws run
in the order of their Bs: swapping Ws that do not changes neither times nor memory.

Passes that take no time (the W of frozen weights) have an order, too, on which memory depends. So
where there are any, each takes one tick, of which a unit of time has more than there are passes.

A single worker with a deterministic time limit: the same question has the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate, chain, combinations, permutations
from math import ceil, floor, gcd, inf
from typing import TYPE_CHECKING, Any

from megatron_zbpp.ir import B, F, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.ends import last_of, replay_whole
from megatron_zbpp.planner.lower_bounds import lower_bound
from megatron_zbpp.planner.problem import EPSILON, Orders, Problem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_DENOMINATORS = range(1, 1001)
_FINE = 10_000  # the longest pass takes so many units where times are not multiples of one unit


@dataclass(frozen=True)
class Answer:
    """The solver's answer."""

    orders: Orders | None  # the best it knows; None if it found nothing
    bound: float  # no orders have a value below this
    effort: float  # deterministic seconds that it took
    overran: bool  # whether the clock ended it; else it would answer the same again


def available() -> bool:
    """Return whether OR-tools is installed."""
    return find_spec('ortools') is not None


def can_solve(problem: Problem) -> bool:
    """Return whether the solver is there and knows what passes hold: limits are of F, B and W."""
    return available() and (problem.is_plain or min(problem.caps) == inf)


def solve(
    problem: Problem, orders: Orders, bound: float, enough: float, effort: float, seconds: float
) -> Answer:
    """Look for better orders, or a proof that there are none.

    Args:
        problem: with tens of passes a rank.
        orders: to start from.
        bound: a lower bound that is known.
        enough: a value above this is of no interest.
        effort: deterministic seconds at most.
        seconds: by the clock at most.

    Raises:
        ValueError: OR-tools is not installed.
    """
    solver = solver_of(effort, seconds)
    from ortools.sat.python import cp_model

    unit, rounded = unit_of((*chain.from_iterable(problem.times), *problem.edges))
    ticks = _ticks(problem, unit)
    scaled = in_ticks(problem, unit, ticks)
    value, ends = replay_whole(scaled, orders)
    value //= ticks
    # Rounding times down may also move a window's start by as much as its stages and edges.
    doubt = 2 * problem.placement.num_stages if rounded and problem.objective == 'window' else 0
    most = min(round(value), floor(enough / unit + EPSILON) + doubt)
    least = min(floor(lower_bound(scaled) / ticks if rounded else bound / unit), most)
    model = Model(cp_model.CpModel(), scaled, ticks, least, most)
    if value <= most:
        model.hint(ends)
    status = interruptible(solver, model.model)
    found = model.orders(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    proven = enough
    if status != cp_model.INFEASIBLE:
        proven = unit * (ceil(solver.best_objective_bound - EPSILON) - doubt)
    overran = status in (cp_model.FEASIBLE, cp_model.UNKNOWN) and solver.wall_time >= seconds
    effort = solver.response_proto.deterministic_time
    return Answer(found, max(bound, proven), effort, overran)


def solver_of(effort: float, seconds: float) -> cp_model.CpSolver:
    """Return a solver with so many deterministic seconds, and so many by the clock."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ValueError(
            'the exact solver needs OR-tools: pip install ortools, or plan without'
        ) from error
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C would end this, and nothing else
    solver.parameters.linearization_level = 0  # linear relaxations cost more than they prove
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = max(seconds, 0.0)
    return solver


def interruptible(solver: Any, model: Any) -> Any:
    """Return the solver's status; Ctrl-C ends it at once, and goes on to whoever called."""
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(solver.solve, model)
        try:
            return status.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


def unit_of(times: tuple[float, ...]) -> tuple[float, bool]:
    """Return the time that is 1 for the solver, and whether times must be rounded down to it."""
    for denominator in _DENOMINATORS:
        if all(abs(time * denominator - round(time * denominator)) < EPSILON for time in times):
            return 1 / denominator, False
    return max(times) / _FINE, True


def whole(time: float, unit: float) -> float:
    """Return how many units are in that time."""
    return float(floor(time / unit + EPSILON))


def _ticks(problem: Problem, unit: float) -> int:
    if all(whole(time, unit) for own in problem.times for time in own):
        return 1
    return 1 + problem.num_queues * problem.num_microbatches


def in_ticks(problem: Problem, unit: float, ticks: int) -> Problem:
    """Return the problem in ticks: whole units, none longer than they were, and one for no time."""
    times: dict[str, list[float]] = {}
    sites = 1 + max(task.stage for task in problem.tasks)
    parts = {task.kind: [(1 / problem.slices,) * problem.slices] * sites for task in problem.tasks}
    for of_slices, own in zip(problem.of_slices, problem.times, strict=True):
        by_slice = sorted((task.slice, time) for task, time in zip(of_slices, own, strict=True))
        taken = [ticks * whole(time, unit) or 1.0 for _, time in by_slice]
        kind, stage, _ = of_slices[0]
        times.setdefault(kind, [0.0] * sites)[stage] = sum(taken)
        parts[kind][stage] = tuple(time / sum(taken) for time in taken)
    edge, route = problem.costs.edge, problem.placement.only_route
    edges = {
        pair: ticks * whole(edge(*pair), unit)
        for pair in permutations(range(problem.placement.num_ranks), 2)
    }

    def hop(made: int, taken: int) -> float:
        ranks = route[made], route[taken]
        return ticks * whole(edge(*ranks, (made, taken)), unit) - edges.get(ranks, 0.0)

    stages, amounts = problem.placement.num_stages, problem.costs.amounts
    held = {name: own for name, own in problem.costs.parts.items() if name in amounts}
    costs = Costs(
        {k: tuple(own[:stages] if k in (F, B, W) else own) for k, own in times.items()},
        amounts=amounts,
        edges=tuple((*pair, latency) for pair, latency in edges.items()),
        hops=tuple((hop(s, s + 1), hop(s + 1, s)) for s in range(stages - 1)),
        parts={**{kind: tuple(own) for kind, own in parts.items()}, **held},
    )
    return replace(problem, costs=costs)


class Model:
    """Start times as variables, and what they must obey."""

    def __init__(
        self, model: cp_model.CpModel, problem: Problem, ticks: int, least: int, most: int
    ) -> None:
        """Write the problem into the model.

        Args:
            model: an empty one.
            problem: in ticks.
            ticks: of a unit.
            least: the objective is no less, in units.
            most: and no more.
        """
        self.model = model
        self.problem = problem
        self.ticks = ticks
        self.horizon = (most + 1) * ticks - 1 + int(max(problem.origins))
        self.lengths = [
            [round(own[i % len(own)]) for i in range(problem.num_microbatches)]
            for own in problem.times
        ]
        self.starts = [self._starts(queue) for queue in range(problem.num_queues)]
        self._order_queues()
        for rank in range(problem.placement.num_ranks):
            self._share_rank(rank)
            self._limit_memory(rank)
            self._pair_weights(rank)
        self._minimise(least, most)

    def hint(self, ends: list[list[float]]) -> None:
        """Start the search from these ends."""
        for variables, own, lengths in zip(self.starts, ends, self.lengths, strict=True):
            for variable, end, length in zip(variables, own, lengths, strict=True):
                self.model.add_hint(variable, round(end) - length)

    def orders(self, solver: cp_model.CpSolver) -> Orders:
        """Return the solution's orders."""
        return [
            [queue for _, queue in sorted(self._runs(solver, queues))]
            for queues in self.problem.queues
        ]

    def _runs(
        self, solver: cp_model.CpSolver, queues: tuple[int, ...]
    ) -> Iterator[tuple[int, int]]:
        for queue in queues:
            for variable in self.starts[queue]:
                yield solver.value(variable), queue

    def _end(self, queue: int, microbatch: int) -> Any:
        return self.starts[queue][microbatch] + self.lengths[queue][microbatch]

    def _starts(self, queue: int) -> list[cp_model.IntVar]:
        first, lengths = round(self.problem.arrivals[queue]), self.lengths[queue]
        before = [0, *accumulate(lengths)]
        left = self.horizon - before[-1]
        return [self.model.new_int_var(first + at, left + at, '') for at in before[: len(lengths)]]

    def _order_queues(self) -> None:
        """Keep microbatches of a queue in order, and passes of a microbatch."""
        for queue, awaited in enumerate(self.problem.awaited):
            for microbatch, start in enumerate(self.starts[queue]):
                if microbatch:
                    self.model.add(start >= self._end(queue, microbatch - 1))
                for need, edge, slices in awaited:
                    end = self._end(need, last_of(microbatch, slices))
                    self.model.add(start >= end + int(edge))

    def _share_rank(self, rank: int) -> None:
        self.model.add_no_overlap(self._computing(rank))

    def _computing(self, rank: int) -> list[cp_model.IntervalVar]:
        """Return when the rank runs passes."""
        return [
            self.model.new_fixed_size_interval_var(start, length, '')
            for queue in self.problem.queues[rank]
            for start, length in zip(self.starts[queue], self.lengths[queue], strict=True)
        ]

    def _limit_memory(self, rank: int) -> None:
        cap, changes = self.problem.caps[rank], self.problem.changes
        if cap == inf:
            return
        if not self.problem.even:
            self._limit_changes(rank, cap)
            return
        forwards, backwards, weights = self.problem.by_stage
        unit = gcd(*(changes[queue] for queue in self.problem.queues[rank])) or 1
        intervals: list[cp_model.IntervalVar] = []
        amounts: list[int] = []
        for stage in self.problem.placement.stages(rank):
            forward, backward, weight = forwards[stage], backwards[stage], weights[stage]
            added = changes[backward]
            for amount, since, until in (
                (-added, forward, backward),
                (min(changes[forward], -changes[weight]), forward, weight),
                (added, backward, weight),
            ):
                if amount > 0:
                    every = range(self.problem.num_microbatches)
                    held = [part for i in every for part in self._held(since, until, i)]
                    intervals += held
                    amounts += [amount // unit] * len(held)
        self.model.add_cumulative(intervals, amounts, int(cap // unit))

    def _limit_changes(self, rank: int, cap: float) -> None:
        times: list[Any] = []
        amounts: list[int] = []
        for queue in self.problem.queues[rank]:
            steps = self.problem.steps[queue]
            for i, start in enumerate(self.starts[queue]):
                amount = steps[i % len(steps)]
                times.append(start if amount > 0 else self._end(queue, i))
                amounts.append(amount)
        self.model.add_reservoir_constraint(times, amounts, min(0, sum(amounts)), int(cap))

    def _held(self, since: int, until: int, microbatch: int) -> list[cp_model.IntervalVar]:
        """Return the interval from the start of one pass to the end of another."""
        return [self._span(self.starts[since][microbatch], self._end(until, microbatch))]

    def _span(self, start: Any, end: Any) -> cp_model.IntervalVar:
        length = self.model.new_int_var(0, self.horizon, '')
        return self.model.new_interval_var(start, length, end, '')

    def _pair_weights(self, rank: int) -> None:
        """Require that Ws that are alike run in the order of their Bs."""
        if not (self.problem.is_plain and self.problem.even):
            return  # they may be needed, or change places with one of another slice
        _, backwards, weights = self.problem.by_stage
        changes, every = self.problem.changes, range(self.problem.num_microbatches)
        for one, other in combinations(self.problem.placement.stages(rank), 2):
            alike = {(self.lengths[w][0], changes[w]) for w in (weights[one], weights[other])}
            if len(alike) > 1:
                continue
            for i in every:
                for j in every:
                    first = self.model.new_bool_var('')
                    for queues in (backwards, weights):
                        before, after = (queues[one], i), (queues[other], j)
                        self._precede(before, after, first)
                        self._precede(after, before, first.negated())

    def _precede(self, before: tuple[int, int], after: tuple[int, int], condition: Any) -> None:
        start = self.starts[after[0]][after[1]]
        constraint = self.model.add(self._end(*before) <= start)
        constraint.only_enforce_if(condition)  # pyright: ignore[reportUnknownMemberType]

    def _minimise(self, least: int, most: int) -> None:
        """Minimise whole units: the ticks of passes that take no time are less than one."""
        value = self.model.new_int_var(least, most, '')
        rest = self.ticks - 1
        for queue in self.problem.sinks:
            origin = int(self.problem.origins[self.problem.ranks[queue]]) // self.ticks
            start = origin * self.ticks
            self.model.add(value * self.ticks + rest >= self._end(queue, -1) - start)
        self.model.minimize(value)
