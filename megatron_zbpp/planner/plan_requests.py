"""Questions to the planner: of which costs, on which placements, in which slices, within what.

`PlanRequest.plan` answers with one plan and `PlanRequest.frontier` with one for each of several
memory limits. An output layer on all ranks is planned by `shard_plans`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.costs_file import SELECTIVE
from megatron_zbpp.ir.formats import UNITS, Units, memory_of_plan
from megatron_zbpp.ir.graph import HOST, PARTNER, TRANSFERS
from megatron_zbpp.planner.cache import planned
from megatron_zbpp.planner.cases import Case, CaseRequest
from megatron_zbpp.planner.cost_sources import StageCosts
from megatron_zbpp.planner.figures import facts
from megatron_zbpp.planner.limits import Budget, Candidate
from megatron_zbpp.planner.plans import Plan, PlanningInterrupted, is_small
from megatron_zbpp.planner.sequence_slices import Count, fewest, slice_counts
from megatron_zbpp.schedules import FAMILIES
from megatron_zbpp.techniques import NAMES, find
from megatron_zbpp.techniques.slices.graph import LEAST, sizes_of

Progress = Callable[[float], None]
_SLICES = 0.5  # share of the time in which the number of slices is found, the rest plans the order
_COPY = tuple(name for name in NAMES if find(name).moves)

# How many chunks a rank may have on each placement that is searched.
PLACEMENTS: dict[str, Callable[[int], bool]] = {
    'loop': lambda chunks: chunks >= 1,
    'v': lambda chunks: chunks == 2,
    'wave': lambda chunks: chunks >= 2,
}


@dataclass(frozen=True)
class PlanAnswer(Plan):
    """A plan, and all that is known of how it came about."""

    cached: bool = False  # read from the folder of earlier plans
    selective: bool = False  # for a training with Megatron's selective recomputation
    cut_short: bool = False  # by the clock, before all named schedules were tried
    units: Units = UNITS  # of the costs
    layout: str | None = None  # layers of the stages, where the costs are those of layers
    counts: tuple[Count, ...] = ()  # numbers of slices that were tried

    def facts(self, against: str = '1f1b') -> dict[str, Any]:
        """Return the fields of `zbpp plan --json`, which a plan's file holds, too."""
        case = Case(self.schedule, self.costs)
        name, value = self.best_named or (None, None)
        return {
            **facts(case, case.timeline, against),
            'objective': self.objective,
            'lower_bound': self.lower_bound,
            'gap': self.gap,
            'best_named': {'name': name, self.objective: value} if name else None,
            'repeats': self.repeats,
            **self._origin(),
            'slice_sizes': sizes_of(self.schedule.graph),
            **self._tried(),
            'schedule': json.loads(self.schedule.to_json()),
            **memory_of_plan(self.costs, self.units),
            **({} if self.layout is None else {'layout': self.layout}),
        }

    def _origin(self) -> dict[str, Any]:
        return {'cached': self.cached, SELECTIVE: self.selective}

    def _tried(self) -> dict[str, Any]:
        return {'slice_counts': [each._asdict() for each in self.counts]}


class FrontierInterrupted(KeyboardInterrupt):
    """Ctrl-C while planning under several limits."""

    def __init__(self, answers: list[tuple[float, PlanAnswer]]) -> None:
        super().__init__()
        # each limit with its best plan, up to the one that was planned
        self.answers = self.best = answers


@dataclass(frozen=True)
class PlanRequest:
    """A plan that is asked for."""

    case: CaseRequest  # sizes, slices, costs and limits; its chunks are those of `num_chunks`
    num_ranks: int
    num_microbatches: int
    num_chunks: Sequence[int] | None = None  # of a rank, to choose from; None: as usual
    placements: Sequence[str] = tuple(PLACEMENTS)
    actions: Sequence[str] = ()  # techniques that may be used, and SELECTIVE
    least_slice: int = LEAST  # tokens of a slice, as a mean of all, where their number is free
    num_layers: int | None = None  # of the model: no more stages than that
    objective: str = 'makespan'
    seconds: float = 20.0
    seed: int = 0
    folder: Path | None = None  # of earlier plans; None: plan anew and keep nothing
    counts: tuple[Count, ...] = ()  # numbers of slices that were tried before

    @classmethod
    def of(cls, case: CaseRequest, options: Mapping[str, Any]) -> PlanRequest:
        """Return the request of a case, with the options that are fields of it."""
        own = {each.name for each in fields(cls)} - {'case', 'counts'}
        return cls(case, **{name: value for name, value in options.items() if name in own})

    def plan(self, progress: Progress | None = None) -> PlanAnswer:
        """Return the best plan; `progress` is called with the share of planning that is done."""
        self.case.require_share()
        if self.case.cut.number == 0:
            return self.in_slices().plan(progress)
        limit, seconds = self.case.memory_limit, self.seconds
        candidates = self.candidates()
        return self._planned(candidates, memory_limit=limit, seconds=seconds, progress=progress)

    def frontier(
        self, limits: Sequence[float], progress: Progress | None = None
    ) -> list[tuple[float, PlanAnswer]]:
        """Return each limit with the best plan under it, none worse than one under less memory."""
        name = self.case.name
        if self.case.cut.number == 0:
            raise ValueError(
                f'{name("slices")} auto is for one memory limit: give {name("memory_limit")}, or '
                'a number'
            )
        if self.case.memory_limit is not None:
            raise ValueError(
                f'{name("frontier")} has the memory limits: leave {name("memory_limit")} out'
            )
        rising = sorted(set(limits))
        request = replace(self, case=replace(self.case, limits=tuple(limits)))
        candidates = request.candidates()
        answers: list[tuple[float, PlanAnswer]] = []
        for at, limit in enumerate(rising):

            def report(share: float, at: int = at) -> None:
                if progress is not None:
                    progress((at + share) / len(rising))

            try:
                answer = request._planned(
                    candidates,
                    memory_limit=limit,
                    seconds=self.seconds / len(rising),
                    starts=tuple(answer.schedule for _, answer in answers),
                    progress=report,
                )
            except PlanningInterrupted as interruption:
                assert isinstance(interruption.best, PlanAnswer)
                raise FrontierInterrupted([*answers, (limit, interruption.best)]) from None
            answers.append((limit, answer))
        return answers

    def _planned(self, candidates: Sequence[Candidate], **inputs: Any) -> PlanAnswer:
        try:
            found, cached = planned(
                self.folder,
                candidates,
                self.num_microbatches,
                objective=self.objective,
                seed=self.seed,
                actions=tuple(name for name in self.actions if name != SELECTIVE),
                graph=self.case.cut.graph(candidates[0][1]),
                **inputs,
            )
        except PlanningInterrupted as interruption:
            raise PlanningInterrupted(self._answer(interruption.best, False)) from None
        return self._answer(found, cached)

    def _answer(self, found: Plan, cached: bool) -> PlanAnswer:
        placement, selective = found.schedule.placement, SELECTIVE in self.actions
        small = is_small(self.num_ranks * self.num_microbatches * 3)
        return PlanAnswer(
            **{each.name: getattr(found, each.name) for each in fields(Plan)},
            cached=cached,
            selective=selective and found.costs != self._with_selective(placement, False),
            cut_short=not (cached or found.repeats or small),
            units=self.case.units,
            layout=self.case.costs.layout(placement),
            counts=self.counts,
        )

    def in_slices(self, progress: Progress | None = None) -> PlanRequest:
        """Return the request with the fewest slices that are hardly longer than any."""
        cut = self.case.cut
        propose = partial(
            slice_counts,
            self.candidates(),
            self.num_microbatches,
            cut.length(f'{cut.name("slices")} auto'),
            cut.parts,
            least=self.least_slice,
            objective=self.objective,
            on_time=Budget(self.seconds * _SLICES, progress).on_time,
        )
        try:
            found = list(propose(memory_limit=self.case.memory_limit))
        except ValueError:
            if not self.actions:
                raise
            found = []
        if not found and self.actions:  # which bring down what is above the limit
            found = list(propose())
        best = fewest(found)
        cut = replace(cut, slices=best.sizes if best.slices > 1 else 1)
        case = replace(self.case, cut=cut)
        return replace(self, case=case, counts=tuple(found), seconds=self.seconds * (1 - _SLICES))

    def named_cases(self) -> Iterator[tuple[str, Case]]:
        """Yield the label of each named schedule that can be had with allowed chunks, and it."""
        for family, chunks in itertools.product(FAMILIES, self.allowed_chunks()):
            if chunks < family.default_chunks == 2 and 'num_chunks' in family.options:
                continue  # of one chunk a rank there are others, as good
            plain = replace(self.case, num_chunks=chunks, memory_limit=None)
            with contextlib.suppress(ValueError):  # it is not for such p, m, chunks or times
                yield family.label(chunks), plain.case(family.name)

    def candidates(self) -> list[Candidate]:
        """Return the allowed placements, each once, with the costs of their stages."""
        name, allowed = self.case.name, self.allowed_chunks()
        p, slices = self.num_ranks, self.case.cut.number or 1
        found: dict[Placement, None] = {}
        for asked in allowed:
            chunks = self.case.costs.chunks(p, asked, asked, name)
            self.case.require_size(p * self.num_microbatches * slices * chunks)
            kinds = [kind for kind in self.placements if PLACEMENTS[kind](chunks)]
            placed = (Placement.loop if kind == 'loop' else Placement.wave for kind in kinds)
            found |= {at(p, chunks): None for at in placed}
        if not found:
            raise ValueError(
                f'{name("placement")} {",".join(self.placements)} cannot have {allowed} chunks per '
                'rank: v takes 2, wave takes 2 or more, loop any'
            )
        ratio, limits = self.case.copy_ratio, self.case.limits
        if ratio is not None and {*self.actions}.isdisjoint(_COPY) and not limits:
            raise ValueError(
                f'{name("copy_ratio")} {ratio:g}, but nothing is copied: give {name("actions")} '
                f'{" or ".join(_COPY)}'
            )
        if not self.actions:
            return [(at, self.case.cut.cut(self.case.costs_of(at))) for at in found]
        if self.case.memory_limit is None and not limits:
            raise ValueError(
                f'{name("actions")} are for a memory limit: give {name("memory_limit")} or '
                f'{name("frontier")}'
            )
        ways = (False, True) if SELECTIVE in self.actions else (False,)
        return [(at, self._with_selective(at, way)) for way in ways for at in found]

    def _with_selective(self, placement: Placement, selective: bool) -> Costs:
        case = self.case
        plain = case.copied(case.costs_of(placement), TRANSFERS[PARTNER])
        if not selective:
            return plain
        if not isinstance(case.costs, StageCosts):
            raise ValueError(
                f'{case.name("actions")} {SELECTIVE}, but {case.name("costs")} says nothing of it: '
                f'give a file that has "{SELECTIVE}": {{"B": [...], "activation": [...]}}'
            )
        found = case.costs_of(placement, selective=True)
        if TRANSFERS[HOST].out in found.times:
            return found
        # what is copied is less
        held = (costs.amounts['activation'] for costs in (found, plain))
        shares = [a / b if b else 1.0 for a, b in zip(*held, strict=True)]
        copies = {
            kind: tuple(time * share for time, share in zip(plain.times[kind], shares, strict=True))
            for kind in (*TRANSFERS[HOST], *TRANSFERS[PARTNER])
        }
        return found.with_times(**{**copies, **found.times})

    def allowed_chunks(self) -> list[int]:
        """Return the chunks per rank that a plan may have."""
        p, costs, name = self.num_ranks, self.case.costs, self.case.name
        usual = [1, 2, 4] if costs.stages is None else [costs.stages // p]
        allowed = list(self.num_chunks or usual)
        if costs.most_stages is not None and self.num_chunks is None:
            allowed = [chunks for chunks in allowed if p * chunks <= max(costs.most_stages, p)]
        if self.num_layers is None:
            return allowed
        fitting = [chunks for chunks in allowed if p * chunks <= self.num_layers]
        if not fitting:
            raise ValueError(
                f'{name("num_layers")} {self.num_layers} are fewer than {p * min(allowed)} stages, '
                f'of {name("num_ranks")} {p} and {name("num_chunks")} {min(allowed)}: use fewer '
                'ranks or chunks'
            )
        return fitting
