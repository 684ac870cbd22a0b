"""A schedule in the making: passes put one after another, with a clock per rank.

For the families whose order is no closed form but depends on when inputs arrive.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import product

from megatron_zbpp.ir import B, F, Graph, Pass, Placement, Schedule, W, chain
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import compiled
from megatron_zbpp.ir.machine import Machine

_ROUNDING = 1e-9  # relative: three thirds of an activation are one


def within(amount: float, limit: float) -> bool:
    """Check that `amount` is at most `limit`, but for rounding."""
    return amount <= limit * (1 + _ROUNDING)


def equal_costs(placement: Placement) -> Costs:
    """Return costs where F, B and W of a stage take 1 each, and messages nothing.

    A full rank holds one activation a microbatch, all of it until the end of W.
    """
    ones = (1.0,) * placement.num_stages
    return Costs.uniform(placement).with_times(F=ones, B=ones, W=ones)


class Draft(Machine):
    """Passes put so far, and what follows from them.

    The caller puts a pass only after what it depends on, and a microbatch after those before it.
    """

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: Costs | None = None,
        graph: Graph | None = None,
    ) -> None:
        graph = graph or chain(placement.num_stages)
        super().__init__(placement, num_microbatches, costs or equal_costs(placement), graph)
        num_ranks = placement.num_ranks
        self._ranks = placement.only_route
        self._changes = self.costs.changes(self.graph)
        self.clock = [0.0] * num_ranks  # end of the last pass
        self.idle = [0.0] * num_ranks  # time lost since the first pass
        self.held = [0.0] * num_ranks  # activations
        # W passes whose B is put and which are not, oldest first
        self.pending: list[deque[Pass]] = [deque() for _ in range(num_ranks)]
        self.orders: list[list[Pass]] = [[] for _ in range(num_ranks)]
        self._started = [0.0] * num_ranks

    def duration(self, kind: str, stage: int) -> float:
        """Return the time of a pass."""
        return self.tables[0][0][kind][stage][-1]

    def has_room(self, stage: int, amount: float, limit: float) -> bool:
        """Check that the rank of `stage` may hold `amount` more and stay within `limit`."""
        return within(self.held[self._ranks[stage]] + amount, limit)

    def put(self, p: Pass, not_before: float = 0.0) -> float:
        """Append `p` to its rank's order, as early as it may start; return its end."""
        rank = self._ranks[p.stage]
        start = max(self.clock[rank], self.arrival(p), not_before)
        if self.orders[rank]:
            self.idle[rank] += start - self.clock[rank]
        else:
            self._started[rank] = start
        end = self.clock[rank] = self.run(p, start)
        self.orders[rank].append(p)
        self.held[rank] += self._changes.get((p.kind, p.stage, p.slice), 0.0)
        if p.kind == W:
            self.pending[rank].popleft()
        elif p.kind == B:
            self.pending[rank].append(p._replace(kind=W))
        return end

    def fill(self, choose: Callable[[int, float], Pass | None]) -> None:
        """Put on each rank that is free what `choose(rank, now)` says; None: it waits for others.

        Where `choose` is asked, the rank has ended what it ran, or an input may have come.
        """
        graph, ranks = self.graph, self._ranks
        # by kind and stage of a pass, other ranks that may have waited for it
        receivers: dict[tuple[str, int], set[int]] = {}
        for kind, stage in product(graph.kinds, range(len(ranks))):
            fed = (taker for task in graph.tasks(kind, stage) for taker, _ in graph.feeds[task])
            receivers[kind, stage] = {ranks[taker.stage] for taker in fed} - {ranks[stage]}
        wakes = [(0.0, rank) for rank in range(len(self.clock))]
        while wakes:
            now, rank = heappop(wakes)
            if self.clock[rank] > now:
                continue  # busy: it wakes again at the end of its pass
            p = choose(rank, now)
            if p is not None:
                end = self.put(p, not_before=now)
                heappush(wakes, (end, rank))
                for neighbour in receivers[p.kind, p.stage]:
                    heappush(wakes, (end + self.costs.edge(rank, neighbour), neighbour))

    @property
    def makespan(self) -> float:
        return max(self.clock)

    @property
    def window(self) -> float:
        """Longest span of one rank, from the start of its first pass to the end of its last."""
        return max(end - start for start, end in zip(self._started, self.clock, strict=True))

    def schedule(self, name: str) -> Schedule:
        return Schedule.of(name, self.placement, self.num_microbatches, self.orders, self.graph)


Lane = Iterable[Pass]


def list_schedule(
    placement: Placement,
    num_microbatches: int,
    lanes: Sequence[Sequence[Lane]],
    memory_limit: float = math.inf,
    graph: Graph | None = None,
) -> Draft:
    """Run the lanes against the clock, each F, B and W of a stage taking the same time.

    A lane is a queue: only its first pass may start. A rank takes from the first of its lanes whose
    first pass has its inputs and, if it is a forward, fits the memory; else the oldest W whose B is
    done; else it waits. So one lane is a fixed order with Ws in its gaps, and a lane for each stage
    and kind is an order of preference. In the latter a forward leaves room for one activation of
    each later chunk of its rank, without which two ranks could each wait for the other's memory.
    `lanes` has, per rank, its lanes of F, B and BW, the most preferred first; Ws come by
    themselves. `memory_limit` is in activations of one microbatch on a full rank.
    """
    draft = Draft(placement, num_microbatches, graph=graph)
    queues = [[*map(deque, of_rank), draft.pending[rank]] for rank, of_rank in enumerate(lanes)]
    parts = compiled(draft.graph).per_stage
    activation = [held / parts for held in draft.costs.amounts['activation']]
    needs = [  # per stage, the room that its forward must find: its own; of several lanes, more
        sum(activation[other] for other in placement.stages(rank) if other >= stage)
        if len(lanes[rank]) > 1
        else activation[stage]
        for stage, rank in enumerate(placement.only_route)
    ]
    draft.fill(lambda rank, now: _next(draft, queues[rank], now, needs, memory_limit))
    if any(queue for of_rank in queues for queue in of_rank):
        raise ValueError(f'memory_limit {memory_limit} is too small: no rank can go on; raise it')
    return draft


def _next(
    draft: Draft, queues: Sequence[deque[Pass]], now: float, needs: list[float], limit: float
) -> Pass | None:
    *lanes, pending = queues
    for lane in lanes:
        if not lane or draft.arrival(lane[0]) > now:
            continue
        if lane[0].kind != F or draft.has_room(lane[0].stage, needs[lane[0].stage], limit):
            return lane.popleft()
    return pending[0] if pending else None
