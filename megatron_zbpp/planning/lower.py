"""Lowering: from an order of passes to each rank's program of passes, sends and receives.

One order of all passes of all ranks, each followed at once by its message, is a way in which all
can happen one after the other: nothing in it waits for what comes later, whatever waits for what.
Each rank's program is that order's projection, so that no rule of a backend can stop it; and
messages from one rank to another are received in the order in which they were sent. `prove` replays
the programs that the runtime will really issue.

Of all such orders the one by the ends of the passes posts each receive right before the pass during
which its message comes: it travels while that pass computes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.planning.costs import Costs
from megatron_zbpp.planning.program import Hand, Instruction, Program, Receive, Send
from megatron_zbpp.planning.prove import prove
from megatron_zbpp.planning.simulate import simulate

# Of a message, in passes of a rank. That there is some puts passes of neighbours that end together
# into the order in which they really end; how much it is hardly matters.
_LATENCY = 0.01


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """The program of each rank, proven to end under every rule of a backend.

    Args:
        schedule: a complete schedule (`check` tells).

    Raises:
        ScheduleError: passes wait for each other across ranks.
    """
    programs: list[list[Instruction]] = [[] for _ in schedule.passes]
    for rank, instruction in _one_by_one(schedule):
        programs[rank].append(instruction)
    lowered = _under_way(schedule, programs)
    prove(lowered)
    return lowered


def takers(schedule: Schedule) -> dict[Pass, list[Pass]]:
    """For each pass whose result others take, those passes: on other ranks by messages."""
    graph, m = schedule.graph, schedule.num_microbatches
    steps, cut = compiled(graph).steps, graph.num_slices
    made: dict[int, Pass] = {}  # by row and microbatch
    for _, p in schedule:
        for row in steps[p.kind][p.stage * cut + p.slice].rows:
            made[row * m + p.microbatch] = p
    taken: dict[Pass, list[Pass]] = {}
    for _, p in schedule:
        for link in steps[p.kind][p.stage * cut + p.slice].links:
            if link.message and p.microbatch >= link.back:
                taken.setdefault(made[link.row * m + p.microbatch - link.back], []).append(p)
    return taken


def _one_by_one(schedule: Schedule) -> Iterator[tuple[int, Instruction]]:
    """All instructions in one order: by the ends of passes, if equal work takes equal time."""
    taken = takers(schedule)
    costs = Costs.uniform(schedule.placement, comm=_LATENCY)
    spans = simulate(schedule, costs).spans
    ends = [(end, rank, at) for rank, own in enumerate(spans) for at, (_, end) in enumerate(own)]
    for _, rank, at in sorted(ends):
        p = schedule.passes[rank][at]
        yield rank, p
        for consumer in taken.get(p, ()):
            peer = schedule.rank_of(consumer)
            if peer == rank:
                yield rank, Hand(p, consumer)
            else:
                yield rank, Send(p, consumer, peer)
                yield peer, Receive(p, consumer, rank)


def _under_way(
    schedule: Schedule, programs: Sequence[Sequence[Instruction]]
) -> tuple[Program, ...]:
    """The programs, in which each send knows how many of its channel may not have come by then.

    A message has come when its consumer runs, and a rank knows that a pass of its peer has run when
    it takes what that peer made later.
    """
    place = {p: at for order in schedule.passes for at, p in enumerate(order)}
    found = []
    for program in programs:
        made: dict[Pass, list[Receive]] = defaultdict(list)  # by consumer: what it takes
        latest: dict[int, int] = defaultdict(lambda: -1)  # of each peer's passes known to have run
        sent: dict[int, deque[int]] = defaultdict(deque)  # places of consumers not known to have
        own: list[Instruction] = []
        for instruction in program:
            if isinstance(instruction, Receive):
                made[instruction.consumer].append(instruction)
            elif isinstance(instruction, Pass):
                for taken in made.pop(instruction, ()):
                    latest[taken.peer] = max(latest[taken.peer], place[taken.producer])
            elif isinstance(instruction, Send):
                consumers = sent[instruction.peer]
                while consumers and consumers[0] < latest[instruction.peer]:
                    consumers.popleft()
                consumers.append(place[instruction.consumer])
                instruction = instruction._replace(under_way=len(consumers))
            own.append(instruction)
        found.append(tuple(own))
    return tuple(found)
