"""A planning problem in flat integers.

Passes of one kind on one stage run in microbatch order, so they form a *queue*, and the order of a
rank is a list of queue numbers: the n-th appearance of a number is microbatch n. A queue is a row
of the compiled graph, a task; fused passes are split, which never costs time or memory. Every array
here is indexed by queue.

Where sequences are sliced, slices are the microbatches here, in the order in which their queue has
them: backwards take the last slice of a sequence first. So they wait for all of its forwards. What
slices take may differ: `durations` and `changes` are means, `times` and `steps` of each slice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, cycle
from math import fsum, inf

from megatron_zbpp.ir import B, F, Graph, Pass, Placement, Schedule, Task, W, chain
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import COMPUTE, DEVICE, Compiled, compiled
from megatron_zbpp.techniques.slices.graph import of_one_slice

Orders = list[list[int]]  # per rank, its queue numbers in the order of their passes
Ends = list[list[float]]  # per queue, when its microbatches end
Inputs = tuple[tuple[int, float], ...]  # queues, and the time on the wire from there
Awaited = tuple[tuple[int, float, int], ...]  # and the size of a group whose last is waited for
SEVERAL = -2  # instead of a queue
OBJECTIVES = ('makespan', 'window')
EPSILON = 1e-9  # times closer than this are equal

_QUANTA = 1 << 40  # the largest activation is so many units: sums of thirds stay exact
_ROUNDING = 1 + 1e-9  # of thousands of them


@dataclass(frozen=True)
class Problem:
    """The question of a plan on one placement."""

    placement: Placement  # its first p stages are on p different ranks, as in loop, V and wave
    num_microbatches: int  # m; where sequences are sliced, all slices of all of them
    costs: Costs  # of the placement's stages, for whole sequences
    # most that each rank may hold, in the unit of `costs.amounts`; inf for no limit
    limits: tuple[float, ...]
    objective: str = 'makespan'  # 'makespan' or 'window'
    graph: Graph | None = None  # of one microbatch; None: a plain pipeline's

    def __post_init__(self) -> None:
        if not self.placement.is_one_way:
            raise ValueError(
                f'placement {self.placement.name!r} has two routes: plan on one of one route'
            )
        graph = self._flat.graph
        for name in {task.kind for task in self.tasks}:
            kind = graph.kinds[name]
            if kind.engine != COMPUTE or kind.optional or kind.every > 1 or self._flat.looks_back:
                raise ValueError(
                    f'the search places what computes once in each microbatch, and {name} '
                    f'({kind.words}) does not: plan without it, and put it into the plan'
                )

    @cached_property
    def with_fewer_microbatches(self) -> Problem:
        """The problem of fewer microbatches, to try things on; itself where that saves little."""
        m = self.num_microbatches
        few = max(12, self.placement.num_ranks * 5 // 2)
        beat = self.slices if self.slices > 1 else 2  # what repeats may span two microbatches
        few += (m - few) % beat
        return self if 3 * few > 2 * m else replace(self, num_microbatches=few)

    def with_times(
        self, times: tuple[tuple[float, ...], ...], inputs: tuple[Inputs, ...]
    ) -> Problem:
        """Return the problem with other `times` and `inputs`, from which all else follows."""
        other = replace(self)
        vars(other).update(times=times, inputs=inputs)
        return other

    @cached_property
    def _flat(self) -> Compiled:
        """The compiled graph of one slice; each row, a task, is a queue."""
        return compiled(of_one_slice(self._graph))

    @cached_property
    def _graph(self) -> Graph:
        return self.graph or chain(self.placement.num_stages)

    @cached_property
    def slices(self) -> int:
        """Into how many parts each sequence is cut."""
        return self._graph.num_slices

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The task of each queue."""
        return tuple(self._flat.rows)

    @property
    def is_plain(self) -> bool:
        """True where its passes are F, B and W of each stage."""
        return not self._flat.graph.techniques

    @cached_property
    def by_stage(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The queues of F, of B and of W, each by stage."""
        if not self.is_plain:
            raise ValueError(
                'what is asked for is known of F, B and W of whole stages only, and the graph has '
                f'{", ".join(each.name for each in self._flat.graph.techniques)}: plan without'
            )
        forward, backward, weight = (
            tuple(queue for queue, task in enumerate(self.tasks) if task.kind == kind)
            for kind in (F, B, W)
        )
        return forward, backward, weight

    @cached_property
    def num_queues(self) -> int:
        return self._flat.num_rows

    @cached_property
    def num_passes(self) -> int:
        return self.num_queues * self.num_microbatches

    @cached_property
    def num_steps(self) -> int:
        """Passes, and inputs that they have beyond one: what a replay of orders looks at."""
        more = sum(max(0, len(inputs) - 1) for inputs in self.inputs)
        return self.num_passes + self.num_microbatches * more

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each queue."""
        return tuple(self.placement.rank_of(task.stage, 0) for task in self.tasks)

    @cached_property
    def queues(self) -> tuple[tuple[int, ...], ...]:
        """Queues of each rank."""
        ranks = range(self.placement.num_ranks)
        return tuple(tuple(q for q, at in enumerate(self.ranks) if at == rank) for rank in ranks)

    @cached_property
    def of_slices(self) -> tuple[tuple[Task, ...], ...]:
        """The tasks of each queue for one sequence, in their order."""
        back, slices = self._graph.last_slice_first, range(self.slices)
        return tuple(
            tuple(
                task._replace(slice=k) for k in (reversed(slices) if task.kind in back else slices)
            )
            for task in self.tasks
        )

    @cached_property
    def times(self) -> tuple[tuple[float, ...], ...]:
        """Times of each queue's slices of one sequence, in their order."""
        costs, graph = self.costs, self._graph
        return tuple(
            tuple(costs.duration(graph, *task[:2], rank, task.slice) for task in own)
            for own, rank in zip(self.of_slices, self.ranks, strict=True)
        )

    @cached_property
    def durations(self) -> tuple[float, ...]:
        """Mean time of a pass."""
        return tuple(fsum(own) / self.slices for own in self.times)

    @cached_property
    def even(self) -> bool:
        """True where all microbatches of a queue take the same time and memory."""
        return all(len({*own}) == 1 for of_queues in (self.times, self.steps) for own in of_queues)

    @cached_property
    def inputs(self) -> tuple[Inputs, ...]:
        """Queues whose same microbatch must end before, but those that others of them imply."""
        return tuple(
            tuple(
                (
                    link.row,
                    self.costs.edge(self.ranks[link.row], rank, (link.stage, task.stage))
                    if link.message
                    else 0.0,
                )
                for link in self._flat.step(*task).links
            )
            for task, rank in zip(self.tasks, self.ranks, strict=True)
        )

    @cached_property
    def awaited(self) -> tuple[Awaited, ...]:
        """The inputs: a backward waits for all forwards of its sequence."""
        back = self._graph.last_slice_first
        return tuple(
            tuple(
                (
                    need,
                    edge,
                    self.slices if task.kind in back and self.tasks[need].kind not in back else 1,
                )
                for need, edge in inputs
            )
            for task, inputs in zip(self.tasks, self.inputs, strict=True)
        )

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """The only input, of the same microbatch; -1: there is none; SEVERAL: see `awaited`."""
        return tuple(
            SEVERAL
            if len(awaited) > 1 or any(slices > 1 for _, _, slices in awaited)
            else awaited[0][0]
            if awaited
            else -1
            for awaited in self.awaited
        )

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """Time on the wire from the input to the earliest start; of several, the longest."""
        return tuple(max((edge for _, edge in inputs), default=0.0) for inputs in self.inputs)

    @cached_property
    def wakes(self) -> tuple[Inputs, ...]:
        """Other ranks that may wait for this queue, and the time on the wire to there."""
        wakes: list[list[tuple[int, float]]] = [[] for _ in self.tasks]
        for rank, inputs in zip(self.ranks, self.inputs, strict=True):
            for need, edge in inputs:
                if self.ranks[need] != rank:
                    wakes[need].append((rank, edge))
        return tuple(map(tuple, wakes))

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """Queues that are no input."""
        needed = {need for inputs in self.inputs for need, _ in inputs}
        return tuple(queue for queue in range(self.num_queues) if queue not in needed)

    @cached_property
    def in_turn(self) -> tuple[int, ...]:
        """All queues behind their inputs; what gives memory back as soon as that may be."""
        missing = [len(inputs) for inputs in self.inputs]
        takers: list[list[int]] = [[] for _ in missing]
        for queue, inputs in enumerate(self.inputs):
            for need, _ in inputs:
                takers[need].append(queue)
        ready = [(self.changes[q], q) for q, count in enumerate(missing) if not count]
        heapify(ready)
        found: list[int] = []
        while ready:
            found.append(heappop(ready)[1])
            for queue in takers[found[-1]]:
                missing[queue] -= 1
                if not missing[queue]:
                    heappush(ready, (self.changes[queue], queue))
        return tuple(found)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each rank spends in passes."""
        return tuple(
            self.num_microbatches * sum(self.durations[queue] for queue in queues)
            for queues in self.queues
        )

    def spent(self, queue: int, count: int) -> float:
        """Return the time of the first passes of a queue."""
        if self.even:
            return count * self.durations[queue]
        sequences, rest = divmod(count, self.slices)
        own = self.times[queue]
        return sequences * self.slices * self.durations[queue] + fsum(own[:rest])

    @cached_property
    def arrivals(self) -> tuple[float, ...]:
        """Earliest start of each queue's microbatch 0."""
        starts = [0.0] * self.num_queues
        for queue in self.in_turn:
            for need, edge in self.inputs[queue]:
                starts[queue] = max(starts[queue], starts[need] + self.times[need][0] + edge)
        return tuple(starts)

    @cached_property
    def firsts(self) -> tuple[float, ...]:
        """The start of each rank's first pass, which no order can change on these placements."""
        return tuple(min(self.arrivals[queue] for queue in queues) for queues in self.queues)

    @cached_property
    def origins(self) -> tuple[float, ...]:
        """The start of the objective's clock on each rank."""
        if self.objective != 'window':
            return (0.0,) * len(self.queues)
        before: list[set[int]] = [set() for _ in self.tasks]
        for queue in self.in_turn:
            for need, _ in self.inputs[queue]:
                before[queue] |= {need, *before[need]}
        for rank, own in enumerate(self.queues):
            first = min(own, key=lambda queue: (len(before[queue]), queue))
            if any(first not in before[queue] for queue in own if queue != first):
                raise ValueError(
                    f'windows of this graph depend on what rank {rank} begins with: plan by '
                    "objective='makespan'"
                )
        return self.firsts

    @cached_property
    def _quantum(self) -> float:
        return (max(self.costs.amounts['activation']) or 1.0) / _QUANTA

    @cached_property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Change of the rank's memory by each slice, by queue as in `times`, in integer units.

        Memory of a whole sequence counts in equal parts of whole units on all its slices.
        """
        counts, costs = compiled(self._graph).changes[DEVICE], self.costs

        def units(name: str, task: Task) -> int:
            share = costs.share(name, task, self.slices)
            return round(costs.amount(name, task) * share / self._quantum)

        return tuple(
            tuple(
                sum(count * units(name, task) for name, count in counts.get(task, {}).items())
                for task in own
            )
            for own in self.of_slices
        )

    @cached_property
    def changes(self) -> tuple[int, ...]:
        """Mean change of memory by a pass of each queue, in the unit of `steps`."""
        return tuple(round(sum(own) / self.slices) for own in self.steps)

    @cached_property
    def raises(self) -> tuple[int, ...]:
        """Largest increase of each rank's memory by a B, in the unit of `changes`."""
        return tuple(
            max(0, *(self.changes[q] for q in queues if self.tasks[q].kind == B))
            for queues in self.queues
        )

    @cached_property
    def stage_queues(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per rank, the queues of F and of B of each stage."""
        forward, backward, _ = self.by_stage
        held = map(self.placement.stages, range(self.placement.num_ranks))
        return tuple(tuple((forward[stage], backward[stage]) for stage in own) for own in held)

    @cached_property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, its queues as they are in `in_turn`."""
        ranks = range(self.placement.num_ranks)
        return tuple(tuple(q for q in self.in_turn if self.ranks[q] == rank) for rank in ranks)

    @cached_property
    def caps(self) -> tuple[float, ...]:
        """`limits` in the unit of `changes`, and what rounding may have added to those."""
        return tuple(x if x == inf else round(x * _ROUNDING / self._quantum) for x in self.limits)

    def fits(self, orders: Orders) -> bool:
        """Check that every rank stays within its limit."""
        return all(map(self.fits_rank, range(len(orders)), orders))

    def fits_rank(self, rank: int, order: list[int]) -> bool:
        """Check that this order of one rank stays within its limit."""
        if self.caps[rank] == inf:
            return True
        if self.even:
            held = accumulate(map(self.changes.__getitem__, order))
        else:
            coming = list(map(cycle, self.steps))
            held = accumulate(next(coming[queue]) for queue in order)
        return max(held) <= self.caps[rank]

    def has(self, schedule: Schedule) -> bool:
        """Check that the schedule is of this placement and graph."""
        return schedule.placement == self.placement and schedule.graph == self._graph

    def orders(self, schedule: Schedule) -> Orders:
        """Return the orders of a schedule on this placement."""
        graph, rows = self._flat.graph, self._flat.rows
        queues = {
            key: [rows[task] for task in graph.tasks(*key)]
            for key in {p[:2] for order in schedule.passes for p in order}
        }
        return [[queue for p in order for queue in queues[p[:2]]] for order in schedule.passes]

    def schedule(self, orders: Orders, name: str) -> Schedule:
        """Return the schedule of these orders."""
        m = self.num_microbatches // self.slices
        return Schedule.of(name, self.placement, m, map(self._passes, orders), self._graph)

    def _passes(self, order: list[int]) -> list[Pass]:
        seen = [0] * self.num_queues
        passes: list[Pass] = []
        for queue in order:
            kind, stage, _ = self.tasks[queue]
            microbatch, part = divmod(seen[queue], self.slices)
            if kind in self._graph.last_slice_first:
                part = self.slices - 1 - part
            passes.append(Pass(kind, stage, microbatch, part))
            seen[queue] += 1
        return passes
