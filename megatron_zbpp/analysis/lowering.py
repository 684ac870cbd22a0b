"""Lowering: from an order of passes to each rank's program of passes, sends and receives.

One order of all passes of all ranks, each followed at once by its message, is a way in which all
can happen one after the other: nothing in it waits for what comes later, whatever waits for what.
Each rank's program is that order's projection, so that no rule of a backend can stop it; and
messages from one rank to another are received in the order in which they were sent. `prove` replays
the programs that the runtime will really issue.

Of all such orders the one by the ends of the passes posts each receive right before the pass during
which its message comes: it travels while that pass computes.

What leaves for the partner's memory is sent where a copy to the host would begin, and comes back
right before the pass that takes memory for it; both stand in the same one order. So do collectives,
each behind the last pass that contributes to it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence, Set
from operator import itemgetter

from megatron_zbpp.analysis import collector, departures
from megatron_zbpp.analysis.deadlock import prove
from megatron_zbpp.analysis.posting import LATE, Posting, Postponed
from megatron_zbpp.analysis.program import (
    Begin,
    Exchange,
    Hand,
    Instruction,
    Join,
    Program,
    Receive,
    Send,
)
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.compiled import Compiled, compiled
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import BROADCAST, REDUCE

# Of a message, in passes of a rank. That there is some puts passes of neighbours that end together
# into the order in which they really end; how much it is hardly matters.
_LATENCY = 0.01


def lower(schedule: Schedule, receives: str = LATE) -> tuple[Program, ...]:
    """Return the program of each rank, proven to end under every rule of a backend.

    Args:
        schedule: a complete schedule (`check` tells).
        receives: when they are posted: one of `posting.RECEIVES`.

    Raises:
        ScheduleError: passes wait for each other across ranks.
    """
    with collector.held_off():
        writer = _Writer(schedule, receives)
        writer.write()
        lowered = tuple(map(tuple, writer.programs))
        prove(lowered)
    return lowered


class _Flow:
    """The dependencies among passes, which are numbers: rank by rank, in order.

    Attributes:
        passes: all of them.
        ranks: where each runs.
        takers: by pass, those that take what it makes, each with the message's name.
        givers: by pass, those that make what it takes.
    """

    def __init__(self, schedule: Schedule) -> None:
        m, cut = schedule.num_microbatches, schedule.graph.num_slices
        flat = compiled(schedule.graph)
        self.passes = list(itertools.chain.from_iterable(schedule.passes))
        self.ranks = [rank for rank, order in enumerate(schedule.passes) for _ in order]
        made = [0] * (flat.num_rows * m)  # by row and microbatch, the pass that makes it
        rows = {
            kind: [step.rows if step else () for step in flat.steps[kind]] for kind in flat.steps
        }
        for number, (kind, stage, microbatch, part) in enumerate(self.passes):
            for row in rows[kind][stage * cut + part]:
                made[row * m + microbatch] = number
        self.takers: list[tuple[tuple[int, str], ...]] = [()] * len(self.passes)
        self.givers: list[tuple[int, ...]] = [()] * len(self.passes)
        messages = _messages(flat)
        for number, (kind, stage, microbatch, part) in enumerate(self.passes):
            for row, back, message in messages[kind][stage * cut + part]:
                if microbatch >= back:
                    giver = made[row * m + microbatch - back]
                    self.takers[giver] += ((number, message),)
                    self.givers[number] += (giver,)


def _messages(flat: Compiled) -> dict[str, list[list[tuple[int, int, str]]]]:
    """Return by kind, stage and slice: row, `back` and name of messages that a pass takes."""
    return {
        kind: [
            [(link.row, link.back, link.message) for link in step.links if link.message]
            if step
            else []
            for step in steps
        ]
        for kind, steps in flat.steps.items()
    }


def takers(schedule: Schedule) -> dict[Pass, list[Pass]]:
    """Return, for each pass whose result other ranks take by messages, those passes."""
    flow = _Flow(schedule)
    return {
        p: [flow.passes[taker] for taker, _ in found]
        for p, found in zip(flow.passes, flow.takers, strict=True)
        if found
    }


class _Writer:
    """Writes all instructions in one order: by the ends of passes, if equal work takes equal time.

    A message has come when its taker runs, and a rank knows that a pass of its peer has run when it
    takes what that peer made later: so each send knows how many of its channel may not have come.

    Attributes:
        programs: for each rank, its part of that order.
    """

    def __init__(self, schedule: Schedule, receives: str) -> None:
        self.programs: list[list[Instruction]] = [[] for _ in schedule.passes]
        self._schedule, self._flow = schedule, _Flow(schedule)
        # by rank and peer: the last pass of the peer that is known to have run, ...
        self._latest: list[dict[int, int]] = [{} for _ in self.programs]
        # ... and the takers of what is on the way there
        self._under_way: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in self.programs]
        self._begun, flat = departures.begun(schedule), compiled(schedule.graph)
        self._between_partners = flat.between_partners
        self._coming_back = flat.between_partners & flat.arriving
        self._partners = list(map(schedule.placement.partner, range(schedule.num_ranks)))
        before = [0, *itertools.accumulate(map(len, schedule.passes))]
        # passes that run as one with the pass behind them
        self._joined = {before[rank] + at for rank, at in schedule.together}
        self._order, spans = _by_end(schedule, self._joined)
        self._posting = Posting(receives, schedule, spans, self._joined)
        self._postponed = Postponed(self.programs)
        self._collectives = _Collectives(self._flow, schedule)

    def write(self) -> None:
        """Write the programs, pass by pass; passes that run as one together."""
        flow = self._flow
        passes, ranks, takers, givers = flow.passes, flow.ranks, flow.takers, flow.givers
        joined, following, postponed = self._joined, self._posting.following, self._postponed
        apart = self._collectives.messages
        group: list[int] = []
        for number in self._order:
            group.append(number)
            if number in joined:
                continue
            rank = ranks[number]
            program, known = self.programs[rank], self._latest[rank]
            if postponed.sent_by[rank]:
                postponed.put_sent_by(rank)
            own = [passes[each] for each in group] if len(group) > 1 else [passes[number]]
            if self._coming_back:
                self._bring_back(own, rank)
            program += [Join(tuple(own)), *own] if len(own) > 1 else own
            following[rank] = number + 1
            if number in postponed.senders:
                postponed.put_behind(number)
            for each in group:
                for giver in givers[each]:
                    peer = ranks[giver]
                    if giver > known.get(peer, -1):
                        known[peer] = giver
            if takers[number] or len(group) > 1:
                self._hand_on(group, rank)
            for exchange in self._collectives.completed_by(group) if apart else ():
                for each in self.programs:
                    each.append(exchange)
            if self._begun:
                self._begin_copies(own, rank)
            group = []

    def _bring_back(self, own: list[Pass], rank: int) -> None:
        """Write the messages by which the partner returns what these passes take."""
        partner = self._partners[rank]
        for p in own:
            if p.kind in self._coming_back:
                (left,) = self._schedule.predecessors(p)
                self.programs[rank].append(Receive(left, p, partner, saved=True))
                self.programs[partner].append(Send(left, p, rank, saved=True))

    def _hand_on(self, group: list[int], rank: int) -> None:
        """Write to whom the results go: to passes of the same rank, or by messages."""
        flow = self._flow
        passes, ranks, programs = flow.passes, flow.ranks, self.programs
        handed_on = [(each, taken) for each in group for taken in flow.takers[each]]
        if apart := self._collectives.messages:
            handed_on = [each for each in handed_on if each[1][1] not in apart]
        program, known, under_way = programs[rank], self._latest[rank], self._under_way[rank]
        for producer, (taker, message) in handed_on:
            p, peer, consumer = passes[producer], ranks[taker], passes[taker]
            if peer == rank:
                program.append(Hand(p, consumer, message))
                continue
            waiting, ran = under_way[peer], known.get(peer, -1)
            while waiting and waiting[0] < ran:
                waiting.popleft()
            waiting.append(taker)
            send = Send(p, consumer, peer, len(waiting), False, message)
            receive = Receive(p, consumer, rank, False, message)
            behind = self._posting.behind(group[-1], peer, handed_on)
            if behind is None:
                program.append(send)
                programs[peer].append(receive)
            else:
                self._postponed.hold(behind, send, receive)

    def _begin_copies(self, own: list[Pass], rank: int) -> None:
        """Write the copies that begin behind these passes: to the host, or to the partner."""
        program, partner = self.programs[rank], self._partners[rank]
        for leaving in [each for p in own for each in self._begun.get(p, ())]:
            if leaving.kind not in self._between_partners:
                program.append(Begin(leaving))
                continue
            (made,) = self._schedule.predecessors(leaving)
            program.append(Send(made, leaving, partner, saved=True))
            self.programs[partner].append(Receive(made, leaving, rank, saved=True))


class _Collectives:
    """The collectives of a schedule, and which passes contribute to each. Passes are numbers.

    Args:
        flow: of the passes.
        schedule: the same.

    Attributes:
        messages: that are exchanged so.
    """

    def __init__(self, flow: _Flow, schedule: Schedule) -> None:
        self._flow, self._all = flow, schedule.graph.collectives
        self.messages = self._all.keys()
        self._taken: dict[tuple[str, int, int], tuple[dict[int, None], dict[int, None]]] = {}
        for giver, found in enumerate(flow.takers if self._all else ()):
            _, _, microbatch, part = flow.passes[giver]
            for taker, message in found:
                if message in self._all:
                    ends = self._taken.setdefault((message, microbatch, part), ({}, {}))
                    ends[0][giver] = ends[1][taker] = None
        self._missing = {key: set(makers) for key, (makers, _) in self._taken.items()}

    def completed_by(self, group: Sequence[int]) -> Iterator[Exchange]:
        """Yield those to which the last contribution is of these passes, in the graph's order."""
        for message in self._all:
            for each in group:
                _, _, microbatch, part = self._flow.passes[each]
                missing = self._missing.get((message, microbatch, part), set())
                if each in missing:
                    missing.discard(each)
                    if not missing:
                        yield self._exchange(message, microbatch, part)

    def _exchange(self, message: str, microbatch: int, part: int) -> Exchange:
        operation, after = self._all[message]
        makers, takers = (sorted(own) for own in self._taken[message, microbatch, part])
        root = {BROADCAST: makers, REDUCE: takers}.get(operation)
        passes = self._flow.passes
        return Exchange(
            operation,
            message,
            self._flow.ranks[root[0]] if root else None,
            tuple(passes[each] for each in makers),
            tuple(passes[each] for each in takers),
            after,
        )


def _by_end(schedule: Schedule, joined: Set[int]) -> tuple[list[int], list[tuple[float, float]]]:
    """Return the numbers of all passes in the order in which they end, and when each runs.

    Those `joined` end together.
    """
    costs = Costs.uniform(schedule.placement, comm=_LATENCY)
    flat, spans = itertools.chain.from_iterable, simulate(schedule, costs).spans
    # copies may end behind passes that come after them
    ends = list(flat(itertools.accumulate(map(itemgetter(1), own), max) for own in spans))
    for number in sorted(joined, reverse=True):
        ends[number] = ends[number + 1]
    return sorted(range(len(ends)), key=ends.__getitem__), list(flat(spans))
