"""The exact form of orders with offload, for small instances, with OR-tools CP-SAT.

To what `cp_sat` says of passes it adds, for each stage and microbatch, whether its activation goes
to the host, and if so when its place is free (the end of the copy out) and when it is taken again.
Copies of a rank run one at a time. (The question of OptPipe, arXiv 2510.05186; the form is ours.)

It asks a little less than schedules must keep: a copy back may begin at any time after its place is
taken. So its bound holds, and what it finds is a start for who rates schedules by simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_zbpp.ir import F, Pass, Schedule
from megatron_zbpp.ir.graph import HOST, TRANSFERS, chain
from megatron_zbpp.planner.cp_sat import Model, in_ticks, interruptible, solver_of, unit_of, whole
from megatron_zbpp.planner.problem import EPSILON, Problem
from megatron_zbpp.techniques.offload.graph import offload

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True)
class Offloads:
    """The solver's answer."""

    bound: float  # no schedule with offload within the limits takes less
    schedule: Schedule | None  # the best that it knows; None: it found nothing that is better
    effort: float  # deterministic seconds that it took
    overran: bool  # whether the clock ended it


def solve_offload(
    problem: Problem, bound: float, known: float, effort: float, seconds: float
) -> Offloads:
    """Look for a schedule with offload, or a proof of how little one can take.

    Args:
        problem: of few passes, all of which take time, with limits and with times of O and L.
        bound: a lower bound that is known.
        known: what a schedule takes that is known; none above this is of interest.
        effort: deterministic seconds at most.
        seconds: by the clock at most.

    Raises:
        ValueError: OR-tools is not installed.
    """
    solver = solver_of(effort, seconds)
    from ortools.sat.python import cp_model

    out, back = (problem.costs.times[kind] for kind in TRANSFERS[HOST])
    unit, rounded = unit_of((*problem.durations, *problem.edges, *out, *back))
    doubt = 2 * problem.placement.num_stages if rounded and problem.objective == 'window' else 0
    most = floor(known / unit + EPSILON) + doubt
    least = 0 if rounded else min(floor(bound / unit), most)
    ways = [(int(whole(a, unit)), int(whole(b, unit))) for a, b in zip(out, back, strict=True)]
    model = _Model(cp_model.CpModel(), in_ticks(problem, unit, 1), ways, least, most)
    status = interruptible(solver, model.model)
    proven = known
    if status != cp_model.INFEASIBLE:
        proven = unit * (ceil(solver.best_objective_bound - EPSILON) - doubt)
    found = model.schedule(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    overran = status in (cp_model.FEASIBLE, cp_model.UNKNOWN) and solver.wall_time >= seconds
    took = solver.response_proto.deterministic_time
    return Offloads(max(bound, min(proven, known)), found, took, overran)


class _Copies(NamedTuple):
    """The copies of one activation."""

    moves: cp_model.IntVar  # whether it goes
    free: cp_model.IntVar  # when its place is; where it stays, `taken`
    taken: cp_model.IntVar  # when it is again
    engine: tuple[cp_model.IntervalVar, cp_model.IntervalVar]  # when the copies run, if they do


class _Model(Model):
    """The solver's model, with copies."""

    def __init__(
        self,
        model: cp_model.CpModel,
        problem: Problem,
        ways: list[tuple[int, int]],
        least: int,
        most: int,
    ) -> None:
        """Write the problem into the model."""
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
        plain = chain(stages)
        graph = offload(plain, gone) if gone else plain
        return Schedule.of('exact', problem.placement, problem.num_microbatches, orders, graph)

    def _order_queues(self) -> None:
        super()._order_queues()
        for stage in range(self.problem.placement.num_stages):
            for i in range(self.problem.num_microbatches):
                self._copies[stage, i] = self._moving(stage, i)

    def _moving(self, stage: int, i: int) -> _Copies:
        """Return the copies of one activation, between its F and its B."""
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

    def _if(self, constraint: Any, condition: Any) -> None:
        self.model.add(constraint).only_enforce_if(condition)  # pyright: ignore[reportUnknownMemberType]

    def _share_rank(self, rank: int) -> None:
        super()._share_rank(rank)
        self.model.add_no_overlap(
            interval for copies in self._of(rank) for interval in copies.engine
        )

    def _computing(self, rank: int) -> list[cp_model.IntervalVar]:
        """Return when the rank runs passes; a place is taken between two."""
        taken = [
            self.model.new_optional_fixed_size_interval_var(copies.taken, 0, copies.moves, '')
            for copies in self._of(rank)
        ]
        return [*super()._computing(rank), *taken]

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
