"""The clock of all tasks: when a pass may start, by what has ended so far.

Each task of the graph is a row of one flat list of ends, m entries a row. A pass may start when all
entries that it is linked to are there, by the time that messages take. Simulation, orders that are
made against the clock, and techniques that look for idle time all ask this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron_zbpp.ir import Graph, Pass, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import Step, compiled

Timing = tuple[int, float, tuple[tuple[int, float], ...], int, tuple[int, ...], float]
"""Of passes of one kind, stage and slice: an entry of `ends` that they need, and the time from
there; the same of what else they need; the entry that they fill; others that they fill; and their
duration. Entries are of microbatch 0. Where a pass needs nothing, that is an entry of the first
row, which is there from the start; where nobody waits for it, it fills one that nobody reads.

An exact tuple: Python unpacks it in half the time of a named one.
"""
_NO_PASS: Timing = (0, 0.0, (), 0, (), 0.0)  # where the graph has no such pass


class Machine:
    """Ends of all tasks of a graph on a placement, and the timing of each kind of pass."""

    def __init__(
        self, placement: Placement, num_microbatches: int, costs: Costs, graph: Graph
    ) -> None:
        self.placement, self.num_microbatches = placement, num_microbatches
        self.costs, self.graph = costs, graph
        self._several_routes = not placement.is_one_way
        flat = compiled(graph)
        self._seldom = {name for name, kind in graph.kinds.items() if kind.every > 1}
        # entries of a row before those of the microbatches: what is looked back to at the start
        self._before = flat.looks_back
        self._length = num_microbatches + self._before
        row = [0.0] * self._before + [inf] * num_microbatches
        # of each task and microbatch; infinite while it has not ended
        self.ends = [0.0] * self._length + row * (flat.num_rows + 1)
        self._unread = (flat.num_rows + 1) * self._length
        # by route and slice, and there by kind and stage: the timing of its passes
        self.tables: list[list[dict[str, list[Timing]]]] = [
            [
                {
                    kind: [
                        self._timing(ranks, kind, stage, part, step) if step else _NO_PASS
                        for stage, step in enumerate(steps[part :: flat.per_stage])
                    ]
                    for kind, steps in flat.steps.items()
                }
                for part in range(flat.per_stage)
            ]
            for ranks in ((*route, *range(placement.num_ranks)) for route in placement.routes)
        ]

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> Machine:
        """Return the machine of a schedule; optional tasks that it does without have ended."""
        graph, m = schedule.graph, schedule.num_microbatches
        machine = cls(schedule.placement, m, costs, graph)
        for task, row in compiled(graph).rows.items():
            if graph.kinds[task.kind].optional:
                for microbatch in range(m):
                    if (task, microbatch) not in schedule.done_by:
                        machine.ends[machine._entry(row) + microbatch] = 0.0
        return machine

    def _entry(self, row: int) -> int:
        return (row + 1) * self._length + self._before

    def _timing(self, ranks: Sequence[int], kind: str, stage: int, part: int, step: Step) -> Timing:
        """Return the timing of a pass, by the rank of each stage; shards, one a rank, follow."""
        graph, rank, travel = self.graph, ranks[stage], self.costs.travel
        need, *more = [
            (
                self._entry(link.row) - link.back,
                travel(graph, link.message, (ranks[link.stage], rank), (link.stage, stage))
                if link.message
                else 0.0,
            )
            for link in step.links
        ] or [(0, 0.0)]
        own, *also = [self._entry(row) for row in step.rows] or [self._unread]
        duration = self.costs.duration(graph, kind, stage, rank, part)
        return *need, tuple(more), own, tuple(also), duration

    def timing(self, p: Pass) -> Timing:
        """Return the timing of passes like `p`."""
        kind, stage, microbatch, part = p
        route = self.placement.route_of(microbatch) if self._several_routes else 0
        return self.tables[route][part][kind][stage]

    def arrival(self, p: Pass) -> float:
        """Return when the inputs of `p` are on its rank; infinite while one has not ended."""
        kind, stage, microbatch, part = p
        route = self.placement.route_of(microbatch) if self._several_routes else 0
        need, edge, more, _, _, _ = self.tables[route][part][kind][stage]
        ends = self.ends
        arrival = ends[need + microbatch] + edge
        for need, edge in more:
            there = ends[need + microbatch] + edge
            if there > arrival:
                arrival = there
        return arrival

    def filled(self, p: Pass) -> list[int]:
        """Return the entries that `p` fills: of a kind that comes seldom, those of its group."""
        _, _, _, own, also, _ = self.timing(p)
        last, every = p.microbatch, self.graph.kinds[p.kind].every
        return [at + last - k for at in (own, *also) for k in range(every)]

    def run(self, p: Pass, start: float) -> float:
        """Note that `p` runs from `start` on; return its end."""
        kind, stage, microbatch, part = p
        route = self.placement.route_of(microbatch) if self._several_routes else 0
        _, _, _, own, also, duration = self.tables[route][part][kind][stage]
        end = start + duration
        self.ends[own + microbatch] = end
        if also or kind in self._seldom:
            for entry in self.filled(p):
                self.ends[entry] = end
        return end
