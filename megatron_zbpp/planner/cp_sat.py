"""The exact solver: optima of small instances, proven, with OR-tools CP-SAT.

One interval a pass; passes of a queue, and of a microbatch, in their order; passes of a rank never
at once; activations within the limit. Two things make it fast enough for p = 4, m = 8: it starts
from the search's best orders and bound, and where two stages of a rank have equal W, their Ws run
in the order of their Bs: swapping Ws that do not changes neither times nor memory.

Passes that take no time (the W of frozen weights) have an order, too, on which memory depends. So
where there are any, each takes one tick, of which a unit of time has more than there are passes.

With offload it is asked, for each stage and microbatch, too, whether its activation goes to the
host, and if so when its place is free (the end of the copy out) and when it is taken again. Copies
of a rank run one at a time. (The question of OptPipe, arXiv 2510.05186; the form is ours.) That
asks a little less than schedules must keep: a copy back may begin at any time after its place is
taken. So the bound holds, and the schedule is a start for who rates schedules by simulation.

A single worker with a deterministic time limit: the same question has the same answer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate, chain, combinations
from math import ceil, floor, gcd, inf
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_zbpp.ir import F, Pass, Schedule
from megatron_zbpp.ir.graph import HOST, TRANSFERS
from megatron_zbpp.ir.graph import chain as plain_graph
from megatron_zbpp.planner.ends import last_of, lower_bound, replay_whole
from megatron_zbpp.planner.problem import EPSILON, Orders, Problem
from megatron_zbpp.techniques.offload import offload

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_DENOMINATORS = range(1, 1001)
_FINE = 10_000  # the longest pass takes so many units where times are not multiples of one unit


@dataclass(frozen=True)
class Answer:
    """The solver's answer."""

    bound: float  # no orders have a value below this
    effort: float  # deterministic seconds that it took
    overran: bool  # whether the clock ended it; else it would answer the same again
    orders: Orders | None = None  # the best it knows; None if it found nothing
    schedule: Schedule | None = None  # the same with offload


def available() -> bool:
    """Return True where OR-tools is installed."""
    return find_spec('ortools') is not None


def can_solve(problem: Problem) -> bool:
    """Return True where the solver is there and knows what passes hold: limits are of F, B, W."""
    return available() and (problem.is_plain or min(problem.caps) == inf)


def solve(
    problem: Problem, orders: Orders, bound: float, enough: float, effort: float, seconds: float
) -> Answer:
    """Look for better orders, or a proof that there are none.

    Values above `enough` are of no interest. `effort` is in deterministic seconds, `seconds` by the
    clock, both at most.
    """
    solver = _solver(effort, seconds)
    from ortools.sat.python import cp_model

    unit, rounded = _unit((*chain.from_iterable(problem.times), *problem.edges))
    every = (_whole(time, unit) for own in problem.times for time in own)
    ticks = 1 if all(every) else 1 + problem.num_queues * problem.num_microbatches
    scaled = in_ticks(problem, unit, ticks)
    value, ends = replay_whole(scaled, orders)
    value //= ticks
    doubt = _doubt(problem, rounded)
    most = min(round(value), floor(enough / unit + EPSILON) + doubt)
    least = min(floor(lower_bound(scaled) / ticks if rounded else bound / unit), most)
    model = _Model(cp_model.CpModel(), scaled, ticks, least, most)
    if value <= most:
        model.hint(ends)
    found, answer = _asked(solver, model.model, bound, enough, unit, doubt)
    return replace(answer, orders=model.orders(solver)) if found else answer


def solve_offload(
    problem: Problem, bound: float, known: float, effort: float, seconds: float
) -> Answer:
    """Look for a schedule with offload, or a proof of how little one can take.

    The problem has few passes, all of which take time, with limits and with times of O and L.
    Values above `known` are of no interest; `effort` is in deterministic seconds, at most.
    """
    solver = _solver(effort, seconds)
    from ortools.sat.python import cp_model

    out, back = (problem.costs.times[kind] for kind in TRANSFERS[HOST])
    unit, rounded = _unit((*problem.durations, *problem.edges, *out, *back))
    doubt = _doubt(problem, rounded)
    most = floor(known / unit + EPSILON) + doubt
    least = 0 if rounded else min(floor(bound / unit), most)
    ways = [(int(_whole(a, unit)), int(_whole(b, unit))) for a, b in zip(out, back, strict=True)]
    model = _OffloadModel(cp_model.CpModel(), in_ticks(problem, unit, 1), ways, least, most)
    found, answer = _asked(solver, model.model, bound, known, unit, doubt)
    answer = replace(answer, bound=max(bound, min(answer.bound, known)))
    return replace(answer, schedule=model.schedule(solver)) if found else answer


def _doubt(problem: Problem, rounded: bool) -> int:
    """Return units by which rounding times down may move a window's start: its stages and edges."""
    return 2 * problem.placement.num_stages if rounded and problem.objective == 'window' else 0


def _solver(effort: float, seconds: float) -> cp_model.CpSolver:
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


def _asked(
    solver: cp_model.CpSolver,
    model: cp_model.CpModel,
    bound: float,
    most: float,
    unit: float,
    doubt: int,
) -> tuple[bool, Answer]:
    """Solve the model; return whether the solver has a solution, and its answer without it."""
    from ortools.sat.python import cp_model

    seconds = solver.parameters.max_time_in_seconds
    status = interruptible(solver, model)
    proven = most
    if status != cp_model.INFEASIBLE:
        proven = unit * (ceil(solver.best_objective_bound - EPSILON) - doubt)
    overran = status in (cp_model.FEASIBLE, cp_model.UNKNOWN) and solver.wall_time >= seconds
    effort = solver.response_proto.deterministic_time
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return found, Answer(max(bound, proven), effort, overran)


def interruptible(solver: Any, model: Any) -> Any:
    """Return the solver's status; Ctrl-C ends it at once, and goes on to whoever called."""
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(solver.solve, model)
        try:
            return status.result()
        except KeyboardInterrupt:
            solver.stop_search()
            raise


def _unit(times: tuple[float, ...]) -> tuple[float, bool]:
    """Return the time that is 1 for the solver, and whether times must be rounded down to it."""
    for denominator in _DENOMINATORS:
        if all(abs(time * denominator - round(time * denominator)) < EPSILON for time in times):
            return 1 / denominator, False
    return max(times) / _FINE, True


def _whole(time: float, unit: float) -> float:
    return float(floor(time / unit + EPSILON))


def in_ticks(problem: Problem, unit: float, ticks: int) -> Problem:
    """Return the problem in ticks: whole units, none longer than they were, and one for no time."""

    def whole(time: float) -> float:
        return ticks * _whole(time, unit)

    times = tuple(tuple(whole(time) or 1.0 for time in own) for own in problem.times)
    inputs = (tuple((need, whole(edge)) for need, edge in own) for own in problem.inputs)
    return problem.with_times(times, tuple(inputs))


class _Model:
    """Start times as variables, and what they must obey."""

    def __init__(
        self, model: cp_model.CpModel, problem: Problem, ticks: int, least: int, most: int
    ) -> None:
        """Write a problem in ticks, so many to a unit, into an empty model; bounds are in units."""
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
            self.model.add_no_overlap(self._computing(rank))
            self._limit_memory(rank)
            self._pair_weights(rank)
        # whole units are minimised: the ticks of passes that take no time are less than one
        value = model.new_int_var(least, most, '')
        for queue in problem.sinks:
            start = int(problem.origins[problem.ranks[queue]]) // ticks * ticks
            model.add(value * ticks + ticks - 1 >= self._end(queue, -1) - start)
        model.minimize(value)

    def hint(self, ends: list[list[float]]) -> None:
        """Start the search from these ends."""
        for variables, own, lengths in zip(self.starts, ends, self.lengths, strict=True):
            for variable, end, length in zip(variables, own, lengths, strict=True):
                self.model.add_hint(variable, round(end) - length)

    def orders(self, solver: cp_model.CpSolver) -> Orders:
        """Return the solution's orders."""
        runs = (
            sorted((solver.value(start), queue) for queue in queues for start in self.starts[queue])
            for queues in self.problem.queues
        )
        return [[queue for _, queue in own] for own in runs]

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

    def _computing(self, rank: int) -> list[cp_model.IntervalVar]:
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
        self._if(self._end(*before) <= self.starts[after[0]][after[1]], condition)

    def _if(self, constraint: Any, condition: Any) -> None:
        self.model.add(constraint).only_enforce_if(condition)  # pyright: ignore[reportUnknownMemberType]


class _Copies(NamedTuple):
    """The copies of one activation."""

    moves: cp_model.IntVar  # whether it goes
    free: cp_model.IntVar  # when its place is; where it stays, `taken`
    taken: cp_model.IntVar  # when it is again
    engine: tuple[cp_model.IntervalVar, cp_model.IntervalVar]  # when the copies run, if they do


class _OffloadModel(_Model):
    """The solver's model, with copies."""

    def __init__(
        self,
        model: cp_model.CpModel,
        problem: Problem,
        ways: list[tuple[int, int]],
        least: int,
        most: int,
    ) -> None:
        self._ways = ways
        self._copies: dict[tuple[int, int], _Copies] = {}
        super().__init__(model, problem, 1, least, most)

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        """Return the solution's schedule: O where a place is free, L where it is taken."""
        problem, stages = self.problem, self.problem.placement.num_stages
        entries: list[list[tuple[int, int, Pass]]] = [[] for _ in problem.queues]
        for rank, queues in enumerate(problem.queues):
            for queue in queues:
                for i, start in enumerate(self.starts[queue]):
                    kind, stage, _ = problem.tasks[queue]
                    p = Pass(kind, stage, i)
                    entries[rank].append((solver.value(start), 2, p))
        gone: set[int] = set()
        for (stage, i), copies in self._copies.items():
            if solver.value(copies.moves):
                gone.add(stage)
                own = entries[problem.placement.only_route[stage]]
                out, back = TRANSFERS[HOST]
                own.append((solver.value(copies.free), 0, Pass(out, stage, i)))
                own.append((solver.value(copies.taken), 1, Pass(back, stage, i)))
        orders = ([p for _, _, p in sorted(own)] for own in entries)
        plain = plain_graph(stages)
        graph = offload(plain, gone) if gone else plain
        return Schedule.of('exact', problem.placement, problem.num_microbatches, orders, graph)

    def _order_queues(self) -> None:
        super()._order_queues()
        for stage in range(self.problem.placement.num_stages):
            for i in range(self.problem.num_microbatches):
                self._copies[stage, i] = self._moving(stage, i)

    def _moving(self, stage: int, i: int) -> _Copies:
        model, (out, back) = self.model, self._ways[stage]
        forwards, backwards, _ = self.problem.by_stage
        forward, backward = self._end(forwards[stage], i), self.starts[backwards[stage]][i]
        moves = model.new_bool_var('')
        free, taken, begin = (model.new_int_var(0, self.horizon, '') for _ in range(3))
        model.add(free >= forward)
        model.add(free <= taken)
        model.add(taken <= backward)
        self._if(free >= forward + out, moves)
        self._if(begin >= taken, moves)
        self._if(begin + back <= backward, moves)
        self._if(free == taken, moves.negated())
        engine = (
            model.new_optional_fixed_size_interval_var(free - out, out, moves, ''),
            model.new_optional_fixed_size_interval_var(begin, back, moves, ''),
        )
        return _Copies(moves, free, taken, engine)

    def _computing(self, rank: int) -> list[cp_model.IntervalVar]:
        taken = [
            self.model.new_optional_fixed_size_interval_var(copies.taken, 0, copies.moves, '')
            for copies in self._of(rank)
        ]
        return [*super()._computing(rank), *taken]

    def _limit_memory(self, rank: int) -> None:
        self.model.add_no_overlap(
            interval for copies in self._of(rank) for interval in copies.engine
        )
        super()._limit_memory(rank)

    def _of(self, rank: int) -> list[_Copies]:
        stages = self.problem.placement.stages(rank)
        return [copies for (stage, _), copies in self._copies.items() if stage in stages]

    def _held(self, since: int, until: int, microbatch: int) -> list[cp_model.IntervalVar]:
        kind, stage, _ = self.problem.tasks[since]
        if kind != F:
            return super()._held(since, until, microbatch)
        copies = self._copies[stage, microbatch]
        start, end = self.starts[since][microbatch], self._end(until, microbatch)
        return [self._span(start, copies.free), self._span(copies.taken, end)]
