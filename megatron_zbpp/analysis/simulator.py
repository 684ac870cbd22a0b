"""Simulation: each pass runs as early as it may, and every rank keeps to its order.

A pass starts when its rank's engine is free and its inputs are there (`ir.machine`). Passes on a
copy engine run beside those that compute, each engine in the order of its rank; but memory changes
in that order (`ir.graph.Hold`): what is copied in waits for the pass before it, what follows a copy
out for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import Compiled, compiled
from megatron_zbpp.ir.machine import Machine, Timing
from megatron_zbpp.ir.timeline import Timeline

_Span = tuple[float, float]
_Place = tuple[int, int]  # rank, and index in its order


class _Engine(NamedTuple):
    """An engine of a rank: its passes run one after the other."""

    rank: int
    places: Sequence[int]
    order: Sequence[Pass]
    alone: dict[int, Timing]  # by place: of passes that run as one, or wait for others
    done: list[_Span]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run each rank's order as early as its dependencies allow.

    A message between ranks takes `costs.edge`, which occupies no device; between stages on one rank
    it takes nothing. Passes that run together start together, take `costs.together` of the sum of
    their times, and hand on at the end of the last. Linear in the number of passes.

    Args:
        schedule: one that `check` accepts; otherwise only deadlock is noticed.
        costs: of its stages. None: those that it was planned for; else F, B and W of a full rank
            take 1 each.

    Raises:
        ScheduleError: no rank can go on; it names each one's next pass and what that waits for.
        ValueError: `costs` has another number of stages.
    """
    costs = costs or Costs.known(schedule)
    costs.require(schedule.placement)
    run = _Run(schedule, costs)
    run.to_the_end()
    unrun = run.unrun()
    if unrun != [len(order) for order in schedule.passes]:
        from megatron_zbpp.analysis.deadlock import stuck  # which no run without an error needs

        raise stuck(schedule, unrun)
    return Timeline(schedule, tuple(map(tuple, run.spans())))


class _Run:
    """The ends of all tasks while the engines advance."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.machine = Machine.of(schedule, costs)
        flat, ends = compiled(schedule.graph), self.machine.ends
        self.waits = _waits(schedule, flat)
        awaited = sorted(set(itertools.chain.from_iterable(self.waits.values())))
        self.noted = {place: len(ends) + k for k, place in enumerate(awaited)}
        ends += [inf] * len(self.noted)
        seldom = {name for name, kind in schedule.graph.kinds.items() if kind.every > 1}
        alone = schedule.together | self.waits.keys() | self.noted.keys()
        alone |= {
            (rank, at)
            for rank, order in enumerate(schedule.passes if seldom else ())
            for at, p in enumerate(order)
            if p.kind in seldom
        }
        self.engines: list[_Engine] = []
        together, copies = schedule.together, flat.on_copy_engines
        for rank, order in enumerate(schedule.passes):
            engines: list[Sequence[int]] = [range(len(order))]
            if together or copies:
                leading = [at for at in range(len(order)) if (rank, at - 1) not in together]
                engines = [
                    [at for at in leading if (order[at].kind in copies) == beside]
                    for beside in (False, True)
                ]
            for places in engines:
                own = order if len(places) == len(order) else [order[at] for at in places]
                apart = [
                    (k, at) for k, at in enumerate(places if alone else ()) if (rank, at) in alone
                ]
                timings = {k: self._joined(rank, at) for k, at in apart}
                self.engines.append(_Engine(rank, places, own, timings, []))

    def to_the_end(self) -> None:
        """Run passes as far as they can."""
        ends, tables = self.machine.ends, self.machine.tables
        route, cycle = self.schedule.placement.route, len(self.schedule.placement.route)
        table = tables[0][0]
        several = len(tables) > 1 or len(tables[0]) > 1
        waiting: dict[int, list[int]] = {}  # entry of `ends` -> the engines that wait for it
        ready = list(range(len(self.engines)))
        while ready:
            engine = ready.pop()
            _, _, order, alone, done = self.engines[engine]
            now = done[-1][1] if done else 0.0
            for k in range(len(done), len(order)):
                kind, stage, microbatch, part = order[k]
                if several:
                    table = tables[route[microbatch % cycle]][part]
                timing = table[kind][stage]
                if alone and k in alone:
                    timing, microbatch = alone[k], 0
                need, edge, more, own, also, duration = timing
                if more:
                    start, need = max(
                        [(ends[e + microbatch] + time, e) for e, time in ((need, edge), *more)]
                    )
                    need += microbatch
                else:
                    need += microbatch
                    start = ends[need] + edge
                if start == inf:
                    waiting.setdefault(need, []).append(engine)
                    break
                if start < now:
                    start = now
                now = start + duration
                done.append((start, now))
                own += microbatch
                ends[own] = now
                if own in waiting:
                    ready += waiting.pop(own)
                if also:
                    for row in also:
                        ends[row + microbatch] = now
                        ready += waiting.pop(row + microbatch, ())

    def unrun(self) -> list[int]:
        """Return the first place of each rank that did not run; the end of its order if all did."""
        first = [len(order) for order in self.schedule.passes]
        for rank, places, order, _, done in self.engines:
            if len(done) < len(order):
                first[rank] = min(first[rank], places[len(done)])
        return first

    def spans(self) -> list[list[_Span]]:
        """Return when passes ran, all of them, in the order of each rank."""
        spans: list[list[_Span]] = [[] for _ in self.schedule.passes]
        for rank, places, order, _, done in self.engines:
            own = len(self.schedule.passes[rank])
            if len(order) == own:
                spans[rank] = done
                continue
            spans[rank] = spans[rank] or [(inf, inf)] * own
            for place, span in zip(places, done, strict=True):
                spans[rank][place] = span
                if (rank, place) in self.schedule.together:
                    self._share(spans[rank], rank, place)
        return spans

    def _group(self, rank: int, first: int) -> tuple[list[Pass], float]:
        """Return the passes that run together from `first` on, and the share of their times."""
        order, last = self.schedule.passes[rank], first
        while (rank, last) in self.schedule.together:
            last += 1
        group = list(order[first : last + 1])
        pair = ''.join(sorted(p.kind for p in group))
        return group, self.costs.pairs.get(pair, self.costs.together) if len(group) > 1 else 1.0

    def _joined(self, rank: int, first: int) -> Timing:
        group, share = self._group(rank, first)
        own = [entry for p in group for entry in self.machine.filled(p)]
        timings = [(p.microbatch, self.machine.timing(p)) for p in group]
        needs = [
            (need + microbatch, edge)
            for microbatch, timing in timings
            for need, edge in (timing[:2], *timing[2])
            if need + microbatch not in own
        ]
        needs += [(self.noted[place], 0.0) for place in self.waits.get((rank, first), ())]
        if (rank, first) in self.noted:
            own.append(self.noted[rank, first])
        duration = share * sum(timing[-1] for _, timing in timings)
        return *needs[0], tuple(needs[1:]), own[0], tuple(own[1:]), duration

    def _share(self, spans: list[_Span], rank: int, first: int) -> None:
        start, _ = spans[first]
        group, share = self._group(rank, first)
        for at, p in enumerate(group, first):
            end = start + share * self.machine.timing(p)[-1]
            spans[at] = start, end
            start = end


def _waits(schedule: Schedule, flat: Compiled) -> dict[_Place, tuple[_Place, ...]]:
    waits: dict[_Place, tuple[_Place, ...]] = {}
    if not flat.on_copy_engines:
        return waits
    for rank, order in enumerate(schedule.passes):
        computed: _Place | None = None  # the latest that computes
        out: tuple[_Place, ...] = ()  # copied out since
        for at, p in enumerate(order):
            if (rank, at - 1) in schedule.together:
                continue
            if p.kind in flat.leaving:
                out += ((rank, at),)
            elif p.kind in flat.arriving and computed:
                waits[rank, at] = (computed,)
            elif p.kind not in flat.on_copy_engines:
                if out:
                    waits[rank, at] = out
                computed, out = (rank, at), ()
    return waits
