"""Plans with the output layer on all ranks, or whole where shards do not pay."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from math import inf
from typing import Any, NamedTuple

from megatron_zbpp.ir import Placement
from megatron_zbpp.planner.cases import IN_FILE, Case, CaseRequest, Undecided
from megatron_zbpp.planner.limits import Budget, always
from megatron_zbpp.planner.plan_requests import PlanAnswer, PlanRequest, Progress
from megatron_zbpp.planner.plans import Plan, PlanningInterrupted, is_small, plan
from megatron_zbpp.planner.sequence_slices import doubled
from megatron_zbpp.schedules import find
from megatron_zbpp.schedules.registry import Sizes
from megatron_zbpp.techniques.composition import OUTPUT
from megatron_zbpp.techniques.slices.balance import balanced
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE, S, T
from megatron_zbpp.techniques.vocabulary.place import HOSTS, hosts_of

HARDLY = 0.01  # of a value: for less neither slices nor shards are worth their passes
_WAYS = 0.5  # share of the time for named schedules, of which each way has an equal part
_TRIED = 5  # times that a pass of a named schedule is looked at, of one that a search replays
ON_ALL, WHOLE = 'on all ranks', 'whole'


class Way(NamedTuple):
    """The best named schedule of a number of slices, with shards or without."""

    slices: int
    layer: str  # where the output layer is
    value: float  # makespan or window
    case: Case
    others: tuple[Case, ...]  # further schedules of the same


@dataclass(frozen=True, kw_only=True)
class ShardAnswer(PlanAnswer):
    """A plan, and the ways that it was chosen from."""

    share: float | str  # of a shard, or where its times are
    ways: tuple[Way, ...]
    best: Way
    request: CaseRequest  # with the slices and shards of the plan

    def _origin(self) -> dict[str, Any]:
        return {'share': self.share}

    def _tried(self) -> dict[str, Any]:
        return {
            'ways': [
                {'slices': slices, 'output_layer': layer, 'name': case.schedule.name}
                | {self.objective: value}
                for slices, layer, value, case, _ in self.ways
            ]
        }

    def reason(self) -> str:
        """Return the gain of slices and shards over the simplest way, for people."""
        first, best = min(self.ways, key=_simplest), self.best
        if (best.slices, best.layer) == (first.slices, first.layer):
            text = f'output layer {best.layer}: slices or shards gain less than {HARDLY:.0%}'
        else:
            cut = f'in {best.slices} slices, ' if best.slices > 1 else ''
            text = f'{cut}output layer {best.layer}: {1 - self.value / first.value:.1%} less than '
            text += f'{first.layer}' + (', and whole sequences' if first.slices == 1 else '')
        whole = next((way for way in self.ways if way.layer == WHOLE), None)
        if whole is None:
            return text
        timeline = whole.case.timeline
        busy = [timeline.busy(rank) for rank in range(whole.case.schedule.num_ranks)]
        more = max(busy) * len(busy) / sum(busy)
        return f'{text}; a whole layer keeps its rank busy {more:.2f} times as long as the mean'


class ShardSearch:
    """A search for the best plan with the output layer on all ranks, or whole where that pays."""

    def __init__(self, asked: PlanRequest) -> None:
        asked.case.require_share()
        for option, value in (('frontier', asked.case.limits), ('actions', asked.actions)):
            if value:
                flags = f'{asked.case.name(option)} with {asked.case.name("vocab_parallel")}'
                raise ValueError(f'{flags} is not planned yet: leave one out')
        self._begun = time.monotonic()
        self._asked, self._case = asked, asked.case
        self._chunks = asked.allowed_chunks()
        wanted = self._case.vocab_parallel
        if wanted == Undecided():
            costs = self._case.costs_of(Placement.loop(asked.num_ranks, self._chunks[0]))
            wanted = Undecided(IN_FILE if {S, T} & costs.times.keys() else USUAL_SHARE)
        self._undecided = isinstance(wanted, Undecided)
        share = wanted.share if isinstance(wanted, Undecided) else wanted
        self._share = USUAL_SHARE if share is None else share
        self._ways: list[Way] = []
        self._in_time = True

    def plan(self, progress: Progress | None = None) -> ShardAnswer:
        """Return the best plan; `progress` is called with the share of planning that is done."""
        if not self._ways:
            self.find_ways()
        shortest = min(way.value for way in self._ways)
        enough = [way for way in self._ways if way.value <= shortest * (1 + HARDLY)]
        best = min(enough, key=lambda way: (*_simplest(way), way.value))
        try:
            return self._answer(self._searched(best, progress), best)
        except PlanningInterrupted as interruption:
            raise PlanningInterrupted(self._answer(interruption.best, best)) from None

    def _answer(self, found: Plan, best: Way) -> ShardAnswer:
        cut = replace(self._case.cut, slices=found.schedule.graph.num_slices)
        share = self._share if best.layer == ON_ALL else None
        own: dict[str, Any] = {each.name: getattr(found, each.name) for each in fields(Plan)}
        own['best_named'] = best.case.schedule.name, best.value
        own['repeats'] = found.repeats and self._in_time
        return ShardAnswer(
            **own,
            units=self._case.units,
            cut_short=not ((found.repeats and self._in_time) or self._is_small),
            share=self._share,
            ways=tuple(self._ways),
            best=best,
            request=replace(self._case, cut=cut, vocab_parallel=share),
        )

    def find_ways(self, progress: Progress | None = None) -> None:
        """Find the best named schedule of each number of slices, with shards and without."""
        budget = Budget(self._asked.seconds * _WAYS, progress)
        found, why = list[Way](), ''
        kinds = {ON_ALL: replace(self._case, vocab_parallel=self._share)}
        if self._undecided:
            kinds[WHOLE] = replace(
                self._case, vocab_parallel=None, vocab_layers=OUTPUT, whole_layer=self._share
            )
        tries = list(product(self._sizes(), kinds.items()))
        for at, (sizes, (layer, case)) in enumerate(tries):
            turn = always if self._is_small else budget.turn(1 / (len(tries) - at))
            if sizes is not None:
                case = replace(case, cut=replace(case.cut, slices=sizes))
            cases, problem = self._cases(replace(case, on_time=turn), needed=not found)
            why = problem or why
            if cases:
                value, slices = self._value(cases[0]), cases[0].schedule.graph.num_slices
                found.append(Way(slices, layer, value, cases[0], tuple(cases[1:])))
        if not found:
            flag = self._case.name('num_chunks')
            raise ValueError(f'none of {", ".join(HOSTS)}: {why or f"{flag}: give 1 or 2"}')
        self._ways, self._in_time = found, not budget.overran

    def _cases(self, case: CaseRequest, needed: bool) -> tuple[list[Case], str]:
        """Return named schedules, the shortest first, and why the last other is impossible."""
        cases, why = list[Case](), ''
        hosts = hosts_of(self._chunks)
        if case.on_time is not always:  # there may be no time for all: the smallest bubble first
            sizes = self._asked.num_ranks, self._asked.num_microbatches
            of = {host: find(host[0]).bubble for host in hosts}
            bubbles = {h: own(Sizes(*sizes, h[1])) if own else inf for h, own in of.items()}
            hosts = sorted(bubbles, key=bubbles.__getitem__)
        for name, chunks in hosts:
            if (cases or not needed) and not case.on_time():
                break
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter('ignore')  # of what slices do not suit
                    cases.append(replace(case, num_chunks=chunks).case(name))
            except ValueError as error:
                why = str(error).partition('\n')[0]
        return sorted(cases, key=self._value), why

    @property
    def _is_small(self) -> bool:
        """True where the clock ends no building of schedules."""
        asked, slices = self._asked, self._case.cut.number
        if slices == 0:  # all that are tried
            slices = (self._case.cut.seq_length or 1) // asked.least_slice
        passes = asked.num_ranks * asked.num_microbatches * max(self._chunks) * 5
        return is_small(_TRIED * passes * max(1, slices or 1))

    def _sizes(self) -> Iterator[int | tuple[int, ...] | None]:
        asked, cut = self._asked, self._case.cut
        if cut.number != 0:
            yield None
            return
        length = cut.length(f'{cut.name("slices")} auto')
        first = self._case.costs_of(Placement.loop(asked.num_ranks, self._chunks[0]))
        sized = partial(balanced, length=length, attention=cut.parts, costs=first)
        units = asked.num_microbatches * asked.num_ranks * max(self._chunks) * 5
        for sizes in doubled(sized, length, asked.least_slice, units):
            yield sizes if len(sizes) > 1 else 1

    def _value(self, case: Case) -> float:
        return case.timeline.value(self._asked.objective)

    def _searched(self, best: Way, progress: Progress | None) -> Plan:
        asked, (schedule, costs, _) = self._asked, best.case
        same = [each.schedule for each in best.others if each.schedule.graph == schedule.graph]
        return plan(
            [(schedule.placement, costs)],
            asked.num_microbatches,
            memory_limit=self._case.memory_limit,
            objective=asked.objective,
            seconds=asked.seconds,
            spent=0.0 if self._is_small else time.monotonic() - self._begun,
            seed=asked.seed,
            starts=[schedule, *(each for each in same if each.placement == schedule.placement)],
            graph=(lambda _: schedule.graph) if schedule.graph.techniques else None,
            progress=progress,
        )


def _simplest(way: Way) -> tuple[int, bool]:
    """Return the sort key of ways: the fewest slices, the whole layer."""
    return way.slices, way.layer == ON_ALL
