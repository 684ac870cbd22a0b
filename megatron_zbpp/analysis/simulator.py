"""Simulation: each pass runs as early as it may, and every rank keeps to its order.

Each task of the graph is a row of one flat list of ends, m entries a row. A pass starts when its
rank's engine is free and all entries that it is linked to are there. Passes on a copy engine run
beside those that compute, each engine in the order of its rank; but memory changes in that order
(`ir.graph.Hold`): what is copied in waits for the pass before it, what follows a copy out for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from typing import NamedTuple

from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.compiled import Compiled, Link, Step, compiled
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline

_PENDING = -inf

_Span = tuple[float, float]
_Place = tuple[int, int]  # rank, and index in its order

_Plain = tuple[int, float, tuple[tuple[int, float], ...], int, tuple[int, ...], float]


class _Flat(NamedTuple):
    """Inputs and times of the passes of one kind, stage and slice; entries are for microbatch 0."""

    need: int  # entry of `ends`; that of the input, which is there from the start, if there is none
    edge: float  # time from there
    more: tuple[tuple[int, float], ...]  # the same of what else they need
    own: int  # entry that they fill; one that nobody reads, if nobody waits for them
    also: tuple[int, ...]  # the others that they fill
    duration: float  # of one

    @property
    def plain(self) -> _Plain:
        """An exact tuple, which Python unpacks in half the time of a named one."""
        return self.need, self.edge, self.more, self.own, self.also, self.duration


# By kind and stage; where the graph has no such pass, what no pass is looked up by.
_NO_PASS = _Flat(0, 0.0, (), 0, (), 0.0)
_Table = dict[str, list[_Flat]]


class _Engine(NamedTuple):
    """An engine of a rank: its passes run one after the other."""

    rank: int
    places: Sequence[int]
    order: Sequence[Pass]
    alone: dict[int, _Flat]
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
        from megatron_zbpp.analysis.waits import stuck  # which no run without an error needs

        raise stuck(schedule, unrun)
    return Timeline(schedule, tuple(map(tuple, run.spans())))


class _Run:
    """The ends of all tasks while the engines advance."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        flat = compiled(schedule.graph)
        self.schedule = schedule
        self.costs = costs
        self.before = flat.looks_back
        self.entries = schedule.num_microbatches + self.before
        self.nobody = (flat.num_rows + 1) * self.entries
        slices = range(schedule.graph.num_slices)
        self.tables = [
            [self._table(flat, route, part) for part in slices]
            for route in range(len(schedule.placement.routes))
        ]
        row = [0.0] * self.before + [_PENDING] * schedule.num_microbatches
        self.ends = [0.0] * self.entries + row * (flat.num_rows + 1)
        for row_of_absent, microbatch in _absent(schedule, flat):
            self.ends[self._entry(row_of_absent) + microbatch] = 0.0
        self.waits = _waits(schedule, flat)
        self.noted = {place: len(self.ends) + k for k, place in enumerate(_awaited(self.waits))}
        self.ends += [_PENDING] * len(self.noted)
        alone = schedule.together | self.waits.keys() | self.noted.keys() | _rare(schedule)
        self.engines = [
            self._engine(rank, places, alone) for rank, places in _engines(schedule, flat)
        ]

    def _engine(self, rank: int, places: Sequence[int], alone: AbstractSet[_Place]) -> _Engine:
        own = self.schedule.passes[rank]
        order = own if len(places) == len(own) else [own[at] for at in places]
        apart = [(k, at) for k, at in enumerate(places) if (rank, at) in alone] if alone else []
        joined = {k: self._joined(rank, at) for k, at in apart}
        return _Engine(rank, places, order, joined, [])

    def _table(self, flat: Compiled, route: int, part: int) -> _Table:
        """Return the dependencies and times of passes of slice `part` on `route`."""
        placement = self.schedule.placement

        def entry(kind: str, stage: int, step: Step) -> _Flat:
            rank = placement.on_route(route, stage)
            needs = [
                (self._entry(link.row) - link.back, self._edge(route, link, stage))
                for link in step.links
            ] or [(0, 0.0)]
            own = [self._entry(row) for row in step.rows] or [self.nobody]
            duration = self.costs.duration(flat.graph, kind, stage, rank, part)
            return _Flat(*needs[0], tuple(needs[1:]), own[0], tuple(own[1:]), duration)

        cut = self.schedule.graph.num_slices
        return {
            kind: [
                entry(kind, stage, step) if step else _NO_PASS
                for stage, step in enumerate(steps[part::cut])
            ]
            for kind, steps in flat.steps.items()
        }

    def _entry(self, row: int) -> int:
        return (row + 1) * self.entries + self.before

    def _edge(self, route: int, link: Link, stage: int) -> float:
        if not link.message:
            return 0.0
        rank_of = self.schedule.placement.on_route
        ranks = rank_of(route, link.stage), rank_of(route, stage)
        return self.costs.travel(self.schedule.graph, link.message, ranks, (link.stage, stage))

    def to_the_end(self) -> None:
        """Run passes as far as they can."""
        ends = self.ends
        route, cycle = self.schedule.placement.route, len(self.schedule.placement.route)
        tables = [
            [{kind: [flat.plain for flat in row] for kind, row in table.items()} for table in parts]
            for parts in self.tables
        ]
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
                flat: _Plain = table[kind][stage]
                if alone and k in alone:
                    flat, microbatch = alone[k].plain, 0
                need, edge, more, own, also, duration = flat
                if more:
                    need, start = self._latest(((need, edge), *more), microbatch)
                else:
                    need += microbatch
                    start = ends[need] + edge
                if start == _PENDING:
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

    def _latest(self, needs: Iterable[tuple[int, float]], microbatch: int) -> tuple[int, float]:
        """Return the entry there last, or one that is not there, and when a pass may start."""
        found = [(self.ends[need + microbatch] + edge, need + microbatch) for need, edge in needs]
        missing = [each for each in found if each[0] == _PENDING]
        start, need = missing[0] if missing else max(found)
        return need, start

    def _group(self, rank: int, first: int) -> tuple[list[tuple[int, _Flat]], float]:
        """Return microbatch and table entry of passes that run together from `first` on."""
        group: list[tuple[int, _Flat]] = []
        for at in itertools.count(first):
            kind, stage, microbatch, part = self.schedule.passes[rank][at]
            table = self.tables[self.schedule.placement.route_of(microbatch)][part]
            group.append((microbatch, table[kind][stage]))
            if (rank, at) not in self.schedule.together:
                break
        kinds = [p.kind for p in self.schedule.passes[rank][first : first + len(group)]]
        return group, self.costs.share_of_pair(kinds) if len(group) > 1 else 1.0

    def _joined(self, rank: int, first: int) -> _Flat:
        group, saved = self._group(rank, first)
        own = list(self._filled(rank, first, group))
        needs = [
            (need + mb, edge)
            for mb, flat in group
            for need, edge in ((flat.need, flat.edge), *flat.more)
            if need + mb not in own
        ]
        needs += [(self.noted[place], 0.0) for place in self.waits.get((rank, first), ())]
        if (rank, first) in self.noted:
            own.append(self.noted[rank, first])
        duration = saved * sum(flat.duration for _, flat in group)
        return _Flat(*needs[0], tuple(needs[1:]), own[0], tuple(own[1:]), duration)

    def _filled(self, rank: int, first: int, group: list[tuple[int, _Flat]]) -> Iterator[int]:
        kinds = self.schedule.graph.kinds
        for at, (mb, flat) in enumerate(group, first):
            every = kinds[self.schedule.passes[rank][at].kind].every
            for row in (flat.own, *flat.also):
                yield from range(row + mb, row + mb - every, -1)

    def _share(self, spans: list[_Span], rank: int, first: int) -> None:
        start, _ = spans[first]
        group, saved = self._group(rank, first)
        for at, (_, flat) in enumerate(group, first):
            end = start + saved * flat.duration
            spans[at] = start, end
            start = end


def _engines(schedule: Schedule, flat: Compiled) -> Iterator[tuple[int, Sequence[int]]]:
    for rank, order in enumerate(schedule.passes):
        if not schedule.together and not flat.on_copy_engines:
            yield rank, range(len(order))
            continue
        leading = [at for at in range(len(order)) if (rank, at - 1) not in schedule.together]
        copies = [at for at in leading if order[at].kind in flat.on_copy_engines]
        yield rank, [at for at in leading if order[at].kind not in flat.on_copy_engines]
        yield rank, copies


def _rare(schedule: Schedule) -> set[_Place]:
    """Return the places of passes that come once in several microbatches."""
    rare = {name for name, kind in schedule.graph.kinds.items() if kind.every > 1}
    if not rare:
        return set()
    orders = enumerate(schedule.passes)
    return {(rank, at) for rank, own in orders for at, p in enumerate(own) if p.kind in rare}


def _absent(schedule: Schedule, flat: Compiled) -> Iterator[tuple[int, int]]:
    """Yield row and microbatch of each task that the schedule does without."""
    kinds = schedule.graph.kinds
    for task, row in flat.rows.items():
        if kinds[task.kind].optional:
            for microbatch in range(schedule.num_microbatches):
                if (task, microbatch) not in schedule.done_by:
                    yield row, microbatch


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


def _awaited(waits: dict[_Place, tuple[_Place, ...]]) -> list[_Place]:
    return sorted(set(itertools.chain.from_iterable(waits.values())))
