"""The planner: the best order that can be found for measured costs under a memory limit.

It starts from every named schedule on the placements that are allowed, so it is never worse than
the best of them; searches on from there (`search`); and on small problems asks the exact solver,
where it is installed, for the optimum or a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.planning import exact
from megatron_zbpp.planning.budget import Budget
from megatron_zbpp.planning.check import check
from megatron_zbpp.planning.costs import Costs
from megatron_zbpp.planning.named import Named, named
from megatron_zbpp.planning.problem import OBJECTIVES, Problem, same_limits
from megatron_zbpp.planning.search import Search

_EXACT_PASSES = 4 * 8 * 2 * 3  # p, m, chunks, kinds: the exact solver ends in time up to here


@dataclass(frozen=True)
class Plan:
    """A schedule that was searched for.

    Attributes:
        schedule: checked.
        costs: that it was planned for.
        objective: 'makespan' or 'window'.
        value: what it takes by `objective`, in the unit of `costs`.
        lower_bound: no schedule on the allowed placements takes less.
        best_named: the best named schedule that fits, and its value; None if none fits.
        repeats: whether the same inputs give the same plan again; not if the clock cut it short.
    """

    schedule: Schedule
    costs: Costs
    objective: str
    value: float
    lower_bound: float
    best_named: tuple[str, float] | None
    repeats: bool

    @property
    def gap(self) -> float:
        """How far the value may be above the optimum, as a share of the bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0


def plan(
    candidates: Sequence[tuple[Placement, Costs]],
    num_microbatches: int,
    *,
    memory_limit: float | Sequence[float] | None = None,
    objective: str = 'makespan',
    seconds: float = 20.0,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Plan:
    """The best schedule found on any of the candidates.

    Args:
        candidates: placements that may be used, each with the costs of its stages.
        num_microbatches: m.
        memory_limit: most that a rank may hold, or one limit a rank, in the unit of
            `costs.activation`.
        objective: 'makespan' while all ranks wait for each other between iterations; 'window',
            the longest span of one rank, where they do not.
        seconds: at most; turned into a number of steps, so that plans can be made again.
        seed: another one searches elsewhere.
        progress: called now and then with the share of the budget that is spent.

    Raises:
        ValueError: no candidates, an unknown objective, or a limit that no schedule can keep.
    """
    if not candidates:
        raise ValueError('no placement to plan on: allow at least one')
    if objective not in OBJECTIVES:
        raise ValueError(f'objective {objective!r} is unknown: use {" or ".join(OBJECTIVES)}')
    budget = Budget(seconds, progress)
    searches, names = [], []
    for placement, costs in candidates:
        limits = same_limits(memory_limit, placement.num_ranks)
        _require_room(placement, costs, limits)
        problem = Problem(placement, num_microbatches, costs, limits, objective)
        known = named(problem)
        names += known
        searches.append(Search(problem, [entry.orders for entry in known], seed))
    for at, search in enumerate(searches):
        search.improve(budget.part(1 / (len(searches) - at)))
        _prove(search, seconds)
    best = min(searches, key=lambda search: search.best.value)
    schedule = best.problem.schedule(best.best.orders, 'auto')
    check(schedule)
    return Plan(
        schedule,
        best.problem.costs,
        objective,
        best.best.value,
        min(search.bound for search in searches),
        _best(names),
        not budget.overran,
    )


def _prove(search: Search, seconds: float) -> None:
    """Asks the exact solver, where the problem is small and the solver is there."""
    if search.done or search.problem.num_passes > _EXACT_PASSES or not exact.available():
        return
    answer = exact.solve(
        search.problem, search.best.orders, search.bound, effort=seconds / 2, seconds=seconds
    )
    search.bound = answer.bound
    if answer.orders is not None:
        search.add(answer.orders)


def _best(names: list[Named]) -> tuple[str, float] | None:
    """Name and value of the best."""
    best = min(names, key=lambda entry: entry.value, default=None)
    return None if best is None else (best.name, best.value)


def _require_room(placement: Placement, costs: Costs, limits: tuple[float, ...]) -> None:
    """Raises where not even one microbatch fits: its activations on a rank are held together."""
    for rank, limit in enumerate(limits):
        least = sum(costs.activation[stage] for stage in placement.stages(rank))
        if limit < least * (1 - 1e-9):
            raise ValueError(
                f'memory limit {limit:g} of rank {rank} is below {least:g}, one microbatch: '
                f'give at least {least:g}, or place fewer layers there'
            )
