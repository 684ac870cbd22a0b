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

import gc
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any

from megatron_zbpp.analysis.deadlock import prove
from megatron_zbpp.analysis.memory import begun
from megatron_zbpp.analysis.program import (
    BY_TAKER,
    EARLY,
    LATE,
    LATEST,
    Begin,
    Exchange,
    Hand,
    Instruction,
    Join,
    Posting,
    Postponed,
    Program,
    Receive,
    Send,
)
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import F, Pass, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import BROADCAST, REDUCE, compiled


@contextmanager
def gc_paused() -> Generator[None, None, None]:
    """Collect nothing within: each collection would look at all that has been made, in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Of a message, in passes of a rank. That there is some puts passes of neighbours that end together
# into the order in which they really end; how much it is hardly matters.
_LATENCY = 0.01
_Taken = tuple[int, str]  # by which pass, and the message's name
# of a named tuple: takes a third of the time of its constructor
_NEW: Callable[..., Any] = vars(tuple)['__new__']


def lower(schedule: Schedule, receives: str = LATE) -> tuple[Program, ...]:
    """Return the program of each rank, proven to end under every rule of a backend.

    `receives` says when they are posted: one of `RECEIVES`, or `BY_TAKER` where shapes vary. Those
    of two ways are the latest: with one open, a rank could not meet the other that holds its stage
    behind a pass.
    """
    if not schedule.placement.is_one_way:
        receives = LATEST
    with gc_paused():
        lowered = _Writer(schedule, receives).write()
        prove(lowered)
    return lowered


class _Flow:
    """The dependencies among passes, which are numbers: rank by rank, in order."""

    def __init__(self, schedule: Schedule) -> None:
        flat, m = compiled(schedule.graph), schedule.num_microbatches
        cut = flat.per_stage
        self.passes = list(itertools.chain.from_iterable(schedule.passes))
        self.ranks = [rank for rank, order in enumerate(schedule.passes) for _ in order]
        made = [0] * (flat.num_rows * m)  # by row and microbatch, the pass that makes it
        # by kind, stage and slice: row, `back` and name of messages that a pass takes
        messages: dict[str, list[list[tuple[int, int, str]]]] = {
            kind: [
                [(link.row, link.back, link.message) for link in step.links if link.message]
                if step
                else []
                for step in steps
            ]
            for kind, steps in flat.steps.items()
        }
        sent = {row for steps in messages.values() for links in steps for row, _, _ in links}
        rows = {
            kind: [[row * m for row in step.rows if row in sent] if step else () for step in steps]
            for kind, steps in flat.steps.items()
        }
        for number, (kind, stage, microbatch, part) in enumerate(self.passes):
            for row in rows[kind][stage * cut + part]:
                made[row + microbatch] = number
        self.takers: list[tuple[_Taken, ...]] = [()] * len(self.passes)
        self.givers: list[tuple[int, ...]] = [()] * len(self.passes)
        for number, (kind, stage, microbatch, part) in enumerate(self.passes):
            for row, back, message in messages[kind][stage * cut + part]:
                if microbatch >= back:
                    giver = made[row * m + microbatch - back]
                    self.takers[giver] += ((number, message),)
                    self.givers[number] += (giver,)


def takers(schedule: Schedule) -> dict[Pass, list[Pass]]:
    """Return, for each pass whose result other ranks take by messages, those passes."""
    flow = _Flow(schedule)
    return {
        p: [flow.passes[taker] for taker, _ in found]
        for p, found in zip(flow.passes, flow.takers, strict=True)
        if found
    }


class _Writer:
    """Writes instructions in one order: by the ends of passes, if equal work takes equal time."""

    def __init__(self, schedule: Schedule, receives: str) -> None:
        self._programs: list[list[Instruction]] = [[] for _ in schedule.passes]
        self._schedule, self._flow = schedule, _Flow(schedule)
        # by rank and peer: the last pass of the peer that is known to have run, ...
        self._latest: list[dict[int, int]] = [{} for _ in self._programs]
        # ... and the takers of what is on the way there
        self._under_way: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in self._programs]
        self._begun, flat = begun(schedule), compiled(schedule.graph)
        self._between_partners = flat.between_partners
        self._coming_back = flat.between_partners & flat.arriving
        self._partners = list(map(schedule.placement.partner, range(schedule.num_ranks)))
        before = [0, *itertools.accumulate(map(len, schedule.passes))]
        # passes that run as one with the pass behind them
        self._joined = {before[rank] + at for rank, at in schedule.together}
        self._order, spans = _by_end(schedule, self._joined)
        if receives == BY_TAKER:
            self._order = _by_takers(schedule, self._flow, self._order, self._joined)
        self._posting = Posting(receives, schedule, spans, self._joined)
        self._late = receives != EARLY
        self._postponed = Postponed(self._programs)
        self._collectives = _Collectives(self._flow, schedule)
        self._apart = self._collectives.messages
        self._moves = bool(self._begun or self._apart)

    def write(self) -> tuple[Program, ...]:
        """Return the programs, written pass by pass; passes that run as one together."""
        flow, programs, postponed = self._flow, self._programs, self._postponed
        passes, ranks, takers, givers = flow.passes, flow.ranks, flow.takers, flow.givers
        joined, following = self._joined, self._posting.following
        sent_by, posted_behind = postponed.sent_by, postponed.posted_behind
        group: list[int] = []  # of passes that run as one, so far
        for number in self._order:
            rank = ranks[number]
            known = self._latest[rank]
            for giver in givers[number]:
                peer = ranks[giver]
                if giver > known.get(peer, -1):
                    known[peer] = giver
            if number in joined:
                group.append(number)
                continue
            if sent_by[rank]:
                for held in sent_by[rank]:  # by the pass before: this one is to run
                    postponed.put(held)
                sent_by[rank].clear()
            if group or self._coming_back:
                self._write_passes([*group, number], rank)
            else:
                programs[rank].append(passes[number])
            following[rank] = number + 1
            if number in posted_behind:
                postponed.put_behind(number)
            if group or self._apart:
                self._hand_on_together([*group, number], rank)
            elif taken := takers[number]:
                self._hand_on(number, number, taken, taken, rank)
            if self._moves:
                self._write_behind([*group, number], rank)
            group.clear()
        return tuple(map(tuple, programs))

    def _write_passes(self, group: Sequence[int], rank: int) -> None:
        program, partner = self._programs[rank], self._partners[rank]
        own = [self._flow.passes[each] for each in group]
        for p in own:
            if p.kind in self._coming_back:
                (left,) = self._schedule.predecessors(p)
                program.append(Receive(left, p, partner, saved=True))
                self._programs[partner].append(Send(left, p, rank, saved=True))
        program += [Join(tuple(own)), *own] if len(own) > 1 else own

    def _hand_on_together(self, group: Sequence[int], rank: int) -> None:
        handed_on = [
            [taken for taken in self._flow.takers[each] if taken[1] not in self._apart]
            for each in group
        ]
        every = list(itertools.chain(*handed_on))
        for producer, taken in zip(group, handed_on, strict=True):
            self._hand_on(producer, group[-1], taken, every, rank)

    def _hand_on(
        self, producer: int, last: int, taken: Sequence[_Taken], every: Sequence[_Taken], rank: int
    ) -> None:
        passes, ranks, programs = self._flow.passes, self._flow.ranks, self._programs
        p, known, under_way = passes[producer], self._latest[rank], self._under_way[rank]
        behind = None
        for taker, message in taken:
            peer, consumer = ranks[taker], passes[taker]
            if peer == rank:
                programs[rank].append(Hand(p, consumer, message))
                continue
            waiting, ran = under_way[peer], known.get(peer, -1)
            while waiting and waiting[0] < ran:
                waiting.popleft()
            waiting.append(taker)
            send = _NEW(Send, (p, consumer, peer, len(waiting), False, message))
            receive = _NEW(Receive, (p, consumer, rank, False, message))
            if self._late:
                behind = self._posting.behind(last, peer, every)
            if behind is None:
                programs[rank].append(send)
                programs[peer].append(receive)
            else:
                self._postponed.hold(behind, send, receive)

    def _write_behind(self, group: Sequence[int], rank: int) -> None:
        """Write collectives that these passes complete, and copies that begin behind them."""
        for exchange in self._collectives.completed_by(group) if self._apart else ():
            for program in self._programs:
                program.append(exchange)
        program, partner = self._programs[rank], self._partners[rank]
        begun = [self._begun.get(self._flow.passes[each], ()) for each in group]
        for leaving in itertools.chain(*begun):  # to the host, or to the partner
            if leaving.kind not in self._between_partners:
                program.append(Begin(leaving))
                continue
            (made,) = self._schedule.predecessors(leaving)
            program.append(Send(made, leaving, partner, saved=True))
            self._programs[partner].append(Receive(made, leaving, rank, saved=True))


class _Collectives:
    """The collectives of a schedule, and which passes contribute to each. Passes are numbers."""

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


def usual_costs(schedule: Schedule) -> Costs:
    """Return by what times programs are written: equal stages, and what other kinds usually take.

    A rank that enters a collective late holds up all: then what the schedule was made for counts.
    """
    graph, usual = schedule.graph, Costs.uniform(schedule.placement, comm=_LATENCY)
    if not graph.collectives:
        return usual
    if schedule.costs is not None:
        latency = _LATENCY * max(schedule.costs.times[F])
        return replace(schedule.costs, comm=schedule.costs.comm or latency)
    times = {
        kind: (each.usual,) * len(graph.sites) for kind, each in graph.kinds.items() if each.usual
    }
    return usual.with_times(**times)


def _by_end(schedule: Schedule, joined: Set[int]) -> tuple[list[int], list[tuple[float, float]]]:
    """Return the numbers of all passes in the order in which they end, and when each runs."""
    spans = simulate(schedule, usual_costs(schedule)).spans
    flat = list(itertools.chain.from_iterable(spans))
    ends = list(map(itemgetter(1), flat))
    if compiled(schedule.graph).on_copy_engines:  # copies end behind passes that come after them
        latest = (itertools.accumulate(map(itemgetter(1), own), max) for own in spans)
        ends = list(itertools.chain.from_iterable(latest))
    for number in sorted(joined, reverse=True):
        ends[number] = ends[number + 1]
    return sorted(range(len(ends)), key=ends.__getitem__), flat


def _by_takers(
    schedule: Schedule, flow: _Flow, order: Sequence[int], joined: Set[int]
) -> list[int]:
    """Return the passes in an order in which forwards take what a rank sent before it goes on."""
    ranks, numbers = flow.ranks, {p: number for number, p in enumerate(flow.passes)}
    needs = [{numbers[q] for q in schedule.predecessors(p)} for p in flow.passes]
    place = {number: at for at, number in enumerate(order)}
    following: list[deque[list[int]]] = [deque() for _ in schedule.passes]  # as one: as one
    for number, rank in enumerate(ranks):
        if number - 1 in joined:
            following[rank][-1].append(number)
        else:
            following[rank].append([number])
    made: set[int] = set()
    untaken: list[set[int]] = [set() for _ in following]  # forwards, by the sender
    result: list[int] = []
    while len(result) < len(order):
        able = [
            rank
            for rank, groups in enumerate(following)
            if groups and all(needs[each] <= made.union(groups[0]) for each in groups[0])
        ]
        free = [rank for rank in able if not untaken[rank]] or able
        rank = min(free, key=lambda rank: place[following[rank][0][-1]])
        group = following[rank].popleft()
        made.update(group)
        result += group
        takers = {taker for each in group for taker, _ in flow.takers[each]}
        untaken[rank] = {
            taker
            for taker in takers
            if flow.passes[taker].kind == F and taker not in following[ranks[taker]][0]
        }
        for each in untaken if following[rank] else ():
            each.difference_update(following[rank][0])
    return result
