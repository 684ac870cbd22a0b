"""TimelyFreeze (arXiv 2602.05754): which weight gradients to leave out, to end a batch soonest.

Every pass of a schedule has a start and, where it computes weight gradients, a duration between
what it takes with everything frozen and with nothing. A linear programme finds the durations: the
shortest batch first, then the least freezing, under a most of freezing in each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

from megatron_zbpp.ir import Pass, Schedule, Task, W
from megatron_zbpp.ir.costs import Costs

FREEZE_STEPS = 4  # two programmes, each written down and solved
_FIRST = 1e6  # how much more the end of the batch counts than all freezing


@dataclass(frozen=True)
class Freezing:
    """The part of each pass's weight gradients to leave out.

    Attributes:
        makespan: of a batch, then.
        without: of a batch without freezing.
        ratios: by pass that computes weight gradients: the share that is left out.
    """

    makespan: float
    without: float
    ratios: dict[Pass, float]

    @property
    def mean(self) -> float:
        """Share that is left out, over all such passes."""
        return sum(self.ratios.values()) / len(self.ratios) if self.ratios else 0.0

    def stage(self, stage: int) -> float:
        """Return the share that is left out in a stage."""
        own = [ratio for p, ratio in self.ratios.items() if p.stage == stage]
        return sum(own) / len(own) if own else 0.0


def freeze(
    schedule: Schedule,
    costs: Costs,
    most: float = 0.9,
    progress: Callable[[float], None] = lambda share: None,
) -> Freezing:
    """Return the shares that make a batch shortest, and of those the least.

    Args:
        schedule: one that `check` accepts.
        costs: of its stages; a frozen BW takes its B, a frozen W nothing.
        most: mean share of a stage that may be left out, from 0 to 1.
        progress: called with the share that is done, after each of `FREEZE_STEPS` steps.

    Raises:
        ValueError: OR-tools is not installed, or `most` is no share.
    """
    if not 0 <= most <= 1:
        raise ValueError(f'a most of {most} is no share: give a number from 0 to 1')
    programme = _Programme(schedule, costs, 0.0)
    progress(1 / FREEZE_STEPS)
    found = without = programme.solve()
    progress(2 / FREEZE_STEPS)
    if most:
        programme = _Programme(schedule, costs, most)
        progress(3 / FREEZE_STEPS)
        found = programme.solve()
    progress(1.0)
    return Freezing(found.makespan, without.makespan, found.ratios)


class _Programme:
    """The linear programme, for GLOP."""

    def __init__(self, schedule: Schedule, costs: Costs, most: float) -> None:
        try:
            glop: Any = import_module('ortools.linear_solver.pywraplp')
        except ImportError as error:
            raise ValueError('freezing needs OR-tools: pip install ortools') from error
        costs.require(schedule.placement)
        solver: Any = glop.Solver.CreateSolver('GLOP')
        self._solver: Any = solver
        self._schedule, self._costs = schedule, costs
        self._end: Any = solver.NumVar(0, solver.infinity(), '')
        self._starts: dict[Pass, Any] = {}
        self._lengths: dict[Pass, Any] = {}
        self._saved: dict[Pass, float] = {}  # by pass: what freezing may save
        for p in _passes(schedule):
            self._add(p)
        for p in _passes(schedule):
            self._order(p)
        for order in schedule.passes:
            for before, after in pairwise(order):
                solver.Add(self._starts[before] + self._lengths[before] <= self._starts[after])
        self._limit(most)
        freezing = sum(self._lengths[p] * (1 / saved) for p, saved in self._saved.items())
        solver.Minimize(_FIRST * self._end - freezing)

    def _add(self, p: Pass) -> None:
        """Add a start, and a duration between its least and its most."""
        rank = self._schedule.rank_of(p)
        full = self._costs.duration(self._schedule.graph, p.kind, p.stage, rank, p.slice)
        speed = self._costs.speeds[rank] if self._costs.speeds else 1.0
        weights = p.kind in self._schedule.graph.doers[W]
        own = Task(W, p.stage, p.slice)
        whole = self._costs.time(own) * self._costs.share(W, own, self._schedule.graph.num_slices)
        saved = whole / speed if weights else 0.0
        self._starts[p] = self._solver.NumVar(0, self._solver.infinity(), '')
        self._lengths[p] = self._solver.NumVar(full - saved, full, '')
        if saved:
            self._saved[p] = saved

    def _order(self, p: Pass) -> None:
        rank, solver = self._schedule.rank_of(p), self._solver
        for q in self._schedule.predecessors(p):
            edge = self._costs.edge(self._schedule.rank_of(q), rank, (q.stage, p.stage))
            solver.Add(self._starts[q] + self._lengths[q] + edge <= self._starts[p])
        solver.Add(self._starts[p] + self._lengths[p] <= self._end)

    def _limit(self, most: float) -> None:
        """Add the most of freezing of each stage."""
        for stage in range(self._schedule.num_stages):
            own = [p for p in self._saved if p.stage == stage]
            if own:
                saved = sum(self._lengths[p].ub() - self._lengths[p] for p in own)
                self._solver.Add(saved <= most * sum(self._saved[p] for p in own))

    def solve(self) -> Freezing:
        status = self._solver.Solve()
        if status != self._solver.OPTIMAL:
            raise RuntimeError(f'GLOP ended with status {status}')
        ratios = {
            p: (self._lengths[p].ub() - self._lengths[p].solution_value()) / saved
            for p, saved in self._saved.items()
        }
        end = self._end.solution_value()
        return Freezing(end, end, {p: min(max(r, 0.0), 1.0) for p, r in ratios.items()})


def _passes(schedule: Schedule) -> Iterator[Pass]:
    for order in schedule.passes:
        yield from order
