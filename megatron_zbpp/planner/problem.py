"""A planning problem in flat integers, and the replay of orders on it: the planner's inner loop.

Passes of one kind on one stage run in microbatch order, so they form a *queue*, and the order of a
rank is a list of queue numbers: the n-th appearance of a number is microbatch n. A queue is a row
of the compiled graph of a plain pipeline: all F by stage, then all B, then all W; fused passes are
split, which never costs time or memory. Every array here is indexed by queue.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf

from megatron_zbpp.ir import Pass, Placement, Schedule, Task, chain
from megatron_zbpp.ir.compiled import Compiled, compiled
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import DEVICE

Orders = list[list[int]]  # per rank, its queue numbers in the order of their passes
Ends = list[list[float]]  # per queue, when its microbatches end
OBJECTIVES = ('makespan', 'window')
EPSILON = 1e-9  # times closer than this are equal

_QUANTA = 1 << 40  # the largest activation is so many units: sums of thirds stay exact
_ROUNDING = 1 + 1e-9  # of thousands of them


@dataclass(frozen=True)
class Problem:
    """The question of a plan on one placement.

    Attributes:
        placement: its first p stages are on p different ranks, as in loop, V and wave.
        num_microbatches: m.
        costs: of the placement's stages.
        limits: most that each rank may hold, in the unit of `costs.amounts`; inf for no limit.
        objective: 'makespan' or 'window'.
    """

    placement: Placement
    num_microbatches: int
    costs: Costs
    limits: tuple[float, ...]
    objective: str = 'makespan'

    def __post_init__(self) -> None:
        if not self.placement.is_one_way:
            raise ValueError(
                f'placement {self.placement.name!r} has two routes: plan on one of one route'
            )

    @cached_property
    def with_fewer_microbatches(self) -> Problem:
        """The same with fewer microbatches, to try things on; itself where that saves little."""
        m = self.num_microbatches
        few = max(12, self.placement.num_ranks * 5 // 2)
        few += (m - few) % 2  # so that what repeats may span two microbatches
        return self if 3 * few > 2 * m else replace(self, num_microbatches=few)

    @cached_property
    def _flat(self) -> Compiled:
        """A queue is a row of this: a task of the graph."""
        return compiled(chain(self.placement.num_stages))

    @cached_property
    def _tasks(self) -> tuple[Task, ...]:
        return tuple(self._flat.rows)

    @cached_property
    def num_queues(self) -> int:
        return self._flat.num_rows

    @cached_property
    def num_passes(self) -> int:
        return self.num_queues * self.num_microbatches

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each queue."""
        ranks = self.placement.only_route
        return tuple(ranks[task.stage] for task in self._tasks)

    @cached_property
    def queues(self) -> tuple[tuple[int, ...], ...]:
        """Queues of each rank."""
        ranks = range(self.placement.num_ranks)
        return tuple(tuple(q for q, at in enumerate(self.ranks) if at == rank) for rank in ranks)

    @cached_property
    def durations(self) -> tuple[float, ...]:
        graph = self._flat.graph
        return tuple(
            self.costs.duration(graph, task.kind, task.stage, rank)
            for task, rank in zip(self._tasks, self.ranks, strict=True)
        )

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """Queue whose same microbatch must end before; -1 for F of stage 0. B's F is implied."""
        links = (self._flat.step(task.kind, task.stage).links for task in self._tasks)
        return tuple(own[0].row if own else -1 for own in links)

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """Time on the wire from the end in `needs` to the earliest start."""
        return tuple(
            self.costs.edge(self.ranks[need], self.ranks[queue]) if need >= 0 else 0.0
            for queue, need in enumerate(self.needs)
        )

    @cached_property
    def feeds(self) -> tuple[int, ...]:
        """Queue on another rank that needs this one; -1 if there is none."""
        feeds = [-1] * self.num_queues
        for queue, need in enumerate(self.needs):
            if need >= 0 and self.ranks[need] != self.ranks[queue]:
                feeds[need] = queue
        return tuple(feeds)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each rank spends in passes."""
        return tuple(
            self.num_microbatches * sum(self.durations[queue] for queue in queues)
            for queues in self.queues
        )

    @cached_property
    def arrivals(self) -> tuple[float, ...]:
        """Earliest start of each queue's microbatch 0: the chain of F, then of B, then W."""
        starts = [0.0] * self.num_queues
        todo = [queue for queue, need in enumerate(self.needs) if need < 0]
        for queue in todo:
            for other, need in enumerate(self.needs):
                if need == queue:
                    starts[other] = starts[queue] + self.durations[queue] + self.edges[other]
                    todo.append(other)
        return tuple(starts)

    @cached_property
    def firsts(self) -> tuple[float, ...]:
        """When each rank starts its first pass, which no order can change on these placements."""
        return tuple(min(self.arrivals[queue] for queue in queues) for queues in self.queues)

    @cached_property
    def origins(self) -> tuple[float, ...]:
        """Where the objective's clock starts on each rank."""
        return self.firsts if self.objective == 'window' else (0.0,) * len(self.queues)

    @cached_property
    def _quantum(self) -> float:
        return (max(self.costs.amounts['activation']) or 1.0) / _QUANTA

    @cached_property
    def changes(self) -> tuple[int, ...]:
        """Changes of a rank's memory by a pass of each queue, in units of the planner's own."""
        counts = self._flat.changes[DEVICE]
        return tuple(
            sum(
                count * round(self.costs.amount(name, task) / self._quantum)
                for name, count in counts[task.kind, task.stage, 0].items()
            )
            for task in self._tasks
        )

    @cached_property
    def raises(self) -> tuple[int, ...]:
        """Per rank, the most that a B adds to what it holds, in the unit of `changes`."""
        count = self.placement.num_stages
        return tuple(
            max(0, *(self.changes[count + stage] for stage in self.placement.stages(rank)))
            for rank in range(self.placement.num_ranks)
        )

    @cached_property
    def caps(self) -> tuple[float, ...]:
        """`limits` in the unit of `changes`, and what rounding may have added to those."""
        return tuple(x if x == inf else round(x * _ROUNDING / self._quantum) for x in self.limits)

    def fits(self, orders: Orders) -> bool:
        """Return whether every rank stays within its limit."""
        return all(map(self.fits_rank, range(len(orders)), orders))

    def fits_rank(self, rank: int, order: list[int]) -> bool:
        """Return whether this order of one rank stays within its limit."""
        held = accumulate(map(self.changes.__getitem__, order))
        return self.caps[rank] == inf or max(held) <= self.caps[rank]

    def orders(self, schedule: Schedule) -> Orders:
        """Return the orders of a schedule on this placement."""
        graph, rows = self._flat.graph, self._flat.rows
        return [
            [rows[task] for p in order for task in graph.tasks(p.kind, p.stage)]
            for order in schedule.passes
        ]

    def schedule(self, orders: Orders, name: str) -> Schedule:
        """Return the schedule of these orders."""
        return Schedule.of(
            name, self.placement, self.num_microbatches, (self._passes(order) for order in orders)
        )

    def _passes(self, order: list[int]) -> list[Pass]:
        seen = [0] * self.num_queues
        passes: list[Pass] = []
        for queue in order:
            kind, stage, _ = self._tasks[queue]
            passes.append(Pass(kind, stage, seen[queue]))
            seen[queue] += 1
        return passes


def replay(
    problem: Problem,
    orders: Orders,
    known: Ends | None = None,
    rank: int = 0,
    at: int = 0,
    cap: float = inf,
) -> tuple[float, Ends] | None:
    """Value and ends of orders in which each pass runs as early as it may.

    Args:
        problem: what the orders are for.
        orders: per rank.
        known: ends of orders that differ only from position `at` of `rank` on: what ended before
            that is taken from there.
        rank: see `known`.
        at: see `known`.
        cap: a value above this is of no interest.

    Returns:
        None if the orders deadlock, or as soon as their value is known to be above `cap`.
    """
    ends: Ends = (
        [[] for _ in problem.durations]
        if known is None
        else _before(problem, orders, known, rank, at)
    )
    positions, clocks, spare = _resume(problem, ends, cap)
    durations, needs, edges = problem.durations, problem.needs, problem.edges
    running = [r for r, order in enumerate(orders) if positions[r] < len(order)]
    while running:
        waiting: list[int] = []
        moved = False
        for r in running:
            order, clock, first = orders[r], clocks[r], positions[r]
            position, slack = first, spare[r]
            for position in range(first, len(order)):
                queue = order[position]
                own, need = ends[queue], needs[queue]
                if need >= 0:
                    needed = ends[need]
                    if len(needed) <= len(own):
                        waiting.append(r)
                        break
                    arrival = needed[len(own)] + edges[queue]
                    if arrival > clock:
                        slack -= arrival - clock
                        if slack < -EPSILON:
                            return None
                        clock = arrival
                clock += durations[queue]
                own.append(clock)
            else:
                position = len(order)
            moved = moved or position > first
            positions[r], clocks[r], spare[r] = position, clock, slack
        if not moved:
            return None
        running = waiting
    return max(clock - origin for clock, origin in zip(clocks, problem.origins, strict=True)), ends


def replay_whole(problem: Problem, orders: Orders) -> tuple[float, Ends]:
    """Return value and end of orders that do not deadlock."""
    result = replay(problem, orders)
    if result is None:
        raise ValueError(f'orders that deadlock: {orders}')
    return result


def _before(problem: Problem, orders: Orders, known: Ends, rank: int, at: int) -> Ends:
    """Return the ends of `known` that a change from position `at` of `rank` on cannot touch."""
    kept = orders[rank][:at]
    counts = {queue: kept.count(queue) for queue in problem.queues[rank]}
    change = known[kept[-1]][counts[kept[-1]] - 1] if kept else 0.0
    return [
        ends[: counts[queue] if queue in counts else bisect_left(ends, change)]
        for queue, ends in enumerate(known)
    ]


def _resume(problem: Problem, ends: Ends, cap: float) -> tuple[list[int], list[float], list[float]]:
    """Per rank: position, clock, and how long it may still idle before its value is above `cap`."""
    positions: list[int] = []
    clocks: list[float] = []
    spare: list[float] = []
    for queues, work, origin in zip(problem.queues, problem.work, problem.origins, strict=True):
        position, clock, done = 0, 0.0, 0.0
        for queue in queues:
            own = ends[queue]
            if own:
                position += len(own)
                done += len(own) * problem.durations[queue]
                clock = max(clock, own[-1])
        positions.append(position)
        clocks.append(clock)
        spare.append(cap + origin - work - clock + done)
    return positions, clocks, spare
