"""A schedule in the making: passes put one after another, with a clock per rank.

For the families whose order is no closed form but depends on when inputs arrive.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from megatron_zbpp.ir import B, Graph, Pass, Placement, Schedule, W, chain
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.costs import Costs

_ROUNDING = 1e-9  # relative: three thirds of an activation are one


def within(amount: float, limit: float) -> bool:
    """Return whether `amount` is at most `limit`, but for rounding."""
    return amount <= limit * (1 + _ROUNDING)


def equal_costs(placement: Placement) -> Costs:
    """Return costs where F, B and W of a stage take 1 each, and messages nothing.

    A full rank holds one activation a microbatch, all of it until the end of W.
    """
    ones = (1.0,) * placement.num_stages
    return Costs.uniform(placement).with_times(F=ones, B=ones, W=ones)


class _Step(NamedTuple):
    """The effects of a pass of one kind and stage, whatever its microbatch.

    Attributes:
        needs: rows of the graph that must have ended, of the same microbatch, and how long what
            they send is on its way.
        rows: that it ends.
        duration: of it.
        change: of what its rank holds.
    """

    needs: tuple[tuple[int, float], ...]
    rows: tuple[int, ...]
    duration: float
    change: float


def _steps(placement: Placement, costs: Costs, graph: Graph) -> dict[str, list[_Step]]:
    """Return the effects of passes by kind, and there by stage and slice, as `Compiled.steps`."""
    ranks, changes = placement.only_route, costs.changes(graph)
    return {
        kind: [
            _Step(
                tuple(
                    (each.row, costs.edge(ranks[each.stage], ranks[stage], (each.stage, stage)))
                    for each in step.links
                ),
                step.rows,
                costs.duration(graph, kind, stage, ranks[stage], part),
                changes[kind, stage, part],
            )
            for at, step in enumerate(steps)
            for stage, part in (divmod(at, graph.num_slices),)
            if step is not None
        ]
        for kind, steps in compiled(graph).steps.items()
    }


class Draft:
    """Passes put so far, and what follows from them.

    The caller puts a pass only after what it depends on, and a microbatch after those before it.

    Attributes:
        graph: of F, B and W.
        costs: those given, or equal ones.
        clock: per rank, the end of its last pass.
        idle: per rank, time lost since its first pass.
        held: per rank, activations held.
        pending: per rank, the W passes whose B is put and which are not, oldest first.
        orders: per rank, the passes.
    """

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: Costs | None = None,
        graph: Graph | None = None,
    ) -> None:
        num_ranks = placement.num_ranks
        self.placement = placement
        self._ranks = placement.only_route
        self.num_microbatches = num_microbatches
        self.costs = costs or equal_costs(placement)
        self.graph = graph or chain(placement.num_stages)
        self._slices = self.graph.num_slices
        self._steps = _steps(placement, self.costs, self.graph)
        self.clock = [0.0] * num_ranks
        self.idle = [0.0] * num_ranks
        self.held = [0.0] * num_ranks
        self.pending: list[deque[Pass]] = [deque() for _ in range(num_ranks)]
        self.orders: list[list[Pass]] = [[] for _ in range(num_ranks)]
        self._started = [0.0] * num_ranks
        # by row of the graph and microbatch: when it ended
        num_rows = compiled(self.graph).num_rows
        self._ended = [[math.inf] * num_microbatches for _ in range(num_rows)]

    def arrival(self, p: Pass) -> float:
        """Return when the inputs of `p` are on its rank; infinite while one of them is not put."""
        kind, stage, microbatch, part = p
        arrival = 0.0
        for row, delay in self._steps[kind][stage * self._slices + part].needs:
            there = self._ended[row][microbatch] + delay
            if there > arrival:
                arrival = there
        return arrival

    def duration(self, kind: str, stage: int) -> float:
        """Return the time of a pass."""
        return self._steps[kind][stage * self._slices].duration

    def has_room(self, stage: int, amount: float, limit: float) -> bool:
        """Return whether the rank of `stage` may hold `amount` more and stay within `limit`."""
        held = self.held[self._ranks[stage]]
        return within(held + amount, limit)

    def put(self, p: Pass, not_before: float = 0.0) -> float:
        """Append `p` to its rank's order, as early as it may start; return its end."""
        kind, stage, microbatch, part = p
        rank = self._ranks[stage]
        start = max(self.clock[rank], self.arrival(p), not_before)
        step = self._steps[kind][stage * self._slices + part]
        if self.orders[rank]:
            self.idle[rank] += start - self.clock[rank]
        else:
            self._started[rank] = start
        end = self.clock[rank] = start + step.duration
        self.orders[rank].append(p)
        self.held[rank] += step.change
        for row in step.rows:
            self._ended[row][microbatch] = end
        if kind == W:
            self.pending[rank].popleft()
        elif kind == B:
            self.pending[rank].append(p._replace(kind=W))
        return end

    @property
    def makespan(self) -> float:
        return max(self.clock)

    @property
    def window(self) -> float:
        """Longest span of one rank, from the start of its first pass to the end of its last."""
        return max(end - start for start, end in zip(self._started, self.clock, strict=True))

    def schedule(self, name: str) -> Schedule:
        return Schedule.of(name, self.placement, self.num_microbatches, self.orders, self.graph)
