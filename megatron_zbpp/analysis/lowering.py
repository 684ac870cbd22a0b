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

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator

from megatron_zbpp.analysis.deadlock import prove
from megatron_zbpp.analysis.program import Hand, Instruction, Program, Receive, Send
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.costs import Costs

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
    lowered = tuple(map(tuple, programs))
    prove(lowered)
    return lowered


class _Flow:
    """Who takes what from whom. Passes are numbers: rank by rank, in order.

    Attributes:
        passes: all of them.
        ranks: where each runs.
        takers: by pass, those that take what it makes.
        givers: by pass, those that make what it takes.
    """

    def __init__(self, schedule: Schedule) -> None:
        graph, m = schedule.graph, schedule.num_microbatches
        flat = compiled(graph)
        self.ranks, self.passes = map(list, zip(*schedule, strict=True))
        steps = [flat.step(kind, stage, part) for kind, stage, _, part in self.passes]
        made: dict[int, int] = {}  # by row and microbatch
        for number, (step, p) in enumerate(zip(steps, self.passes, strict=True)):
            for row in step.rows:
                made[row * m + p.microbatch] = number
        self.takers: dict[int, list[int]] = {}
        self.givers: dict[int, list[int]] = {}
        for number, (step, p) in enumerate(zip(steps, self.passes, strict=True)):
            for link in step.links:
                if link.message and p.microbatch >= link.back:
                    giver = made[link.row * m + p.microbatch - link.back]
                    self.takers.setdefault(giver, []).append(number)
                    self.givers.setdefault(number, []).append(giver)


def takers(schedule: Schedule) -> dict[Pass, list[Pass]]:
    """For each pass whose result others take, those passes: on other ranks by messages."""
    flow = _Flow(schedule)
    return {
        flow.passes[giver]: [flow.passes[taker] for taker in found]
        for giver, found in flow.takers.items()
    }


def _one_by_one(schedule: Schedule) -> Iterator[tuple[int, Instruction]]:
    """All instructions in one order: by the ends of passes, if equal work takes equal time.

    A message has come when its taker runs, and a rank knows that a pass of its peer has run when it
    takes what that peer made later: so each send knows how many of its channel may not have come.
    """
    flow = _Flow(schedule)
    passes, ranks = flow.passes, flow.ranks
    costs = Costs.uniform(schedule.placement, comm=_LATENCY)
    spans = itertools.chain.from_iterable(simulate(schedule, costs).spans)
    latest: dict[tuple[int, int], int] = {}  # by rank and peer: pass of the peer known to have run
    under_way: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # takers, by rank and peer
    for _, number in sorted((end, number) for number, (_, end) in enumerate(spans)):
        rank, p = ranks[number], passes[number]
        yield rank, p
        for giver in flow.givers.get(number, ()):
            pair = rank, ranks[giver]
            latest[pair] = max(giver, latest.get(pair, -1))
        for number_taking in flow.takers.get(number, ()):
            peer, taker = ranks[number_taking], passes[number_taking]
            if peer == rank:
                yield rank, Hand(p, taker)
                continue
            channel = under_way[rank, peer]
            while channel and channel[0] < latest.get((rank, peer), -1):
                channel.popleft()
            channel.append(number_taking)
            yield rank, Send(p, taker, peer, len(channel))
            yield peer, Receive(p, taker, rank)
