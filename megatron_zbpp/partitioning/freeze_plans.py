"""TimelyFreeze (arXiv 2602.05754): weight gradients to leave out, and the plan that a run follows.

Every pass of a schedule has a start and, where it computes weight gradients, a duration between
that of a frozen pass and that of a whole one. A linear programme finds the durations: the shortest
batch first, then the least freezing, under a most of freezing in each stage.

Steps of a warm-up freeze nothing; nor do those of monitoring, whose times freezing is compared
with; then the shares grow to those of the linear programme. In a pass of share r, r of its n weight
gradients are left out: drawn anew every ten steps, by numbers that all replicas have alike. In the
first stage gradients of the front layers are drawn more often. The last stage keeps one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from megatron_zbpp.ir import Pass, Schedule, W, files, strict_json
from megatron_zbpp.ir.costs import Costs

FREEZE_STEPS = 4  # two programmes, each written down and solved
_FIRST = 1e6  # how much more the end of the batch counts than all freezing


@dataclass(frozen=True)
class Freezing:
    """The part of each pass's weight gradients to leave out."""

    makespan: float  # of a batch, then
    without: float  # of a batch without freezing
    ratios: dict[Pass, float]  # by pass that computes weight gradients: the share that is left out

    @property
    def mean(self) -> float:
        """Share that is left out, over all such passes."""
        return sum(self.ratios.values()) / len(self.ratios) if self.ratios else 0.0

    def stage(self, stage: int) -> float:
        """Return the share that is left out in a stage."""
        own = [ratio for p, ratio in self.ratios.items() if p.stage == stage]
        return sum(own) / len(own) if own else 0.0


def freeze(
    schedule: Schedule,
    costs: Costs,
    most: float = 0.9,
    progress: Callable[[float], None] = lambda share: None,
) -> Freezing:
    """Return the shares that make a batch shortest, and of those the least.

    A frozen BW takes its B, a frozen W nothing. `most` is the mean share of a stage that may be
    left out, from 0 to 1; `progress` is called after each of `FREEZE_STEPS` steps.
    """
    if not 0 <= most <= 1:
        raise ValueError(f'a most of {most} is no share: give a number from 0 to 1')
    found = without = _solved(schedule, costs, 0.0, lambda: progress(1 / FREEZE_STEPS))
    progress(2 / FREEZE_STEPS)
    if most:
        found = _solved(schedule, costs, most, lambda: progress(3 / FREEZE_STEPS))
    progress(1.0)
    return Freezing(found.makespan, without.makespan, found.ratios)


def _solved(schedule: Schedule, costs: Costs, most: float, written: Callable[[], None]) -> Freezing:
    """Return the solution of the linear programme, by GLOP; `written` is called before that."""
    try:
        glop: Any = import_module('ortools.linear_solver.pywraplp')
    except ImportError as error:
        raise ValueError('freezing needs OR-tools: pip install ortools') from error
    costs.require(schedule.placement)
    solver: Any = glop.Solver.CreateSolver('GLOP')
    end: Any = solver.NumVar(0, solver.infinity(), '')
    starts: dict[Pass, Any] = {}
    lengths: dict[Pass, Any] = {}  # each between that of a frozen pass and that of a whole one
    saved: dict[Pass, float] = {}  # by pass: what freezing may save
    passes = [p for order in schedule.passes for p in order]
    for p in passes:
        graph, at = schedule.graph, (p.stage, schedule.rank_of(p), p.slice)
        full = costs.duration(graph, p.kind, *at)
        less = costs.duration(graph, W, *at) if p.kind in graph.doers[W] else 0.0
        starts[p] = solver.NumVar(0, solver.infinity(), '')
        lengths[p] = solver.NumVar(full - less, full, '')
        saved |= {p: less} if less else {}
    for p in passes:
        rank = schedule.rank_of(p)
        for q in schedule.predecessors(p):
            edge = costs.edge(schedule.rank_of(q), rank, (q.stage, p.stage))
            solver.Add(starts[q] + lengths[q] + edge <= starts[p])
        solver.Add(starts[p] + lengths[p] <= end)
    for before, after in (pair for order in schedule.passes for pair in pairwise(order)):
        solver.Add(starts[before] + lengths[before] <= starts[after])
    for stage in range(schedule.num_stages):
        held = [p for p in saved if p.stage == stage]
        if held:
            frozen = sum(lengths[p].ub() - lengths[p] for p in held)
            solver.Add(frozen <= most * sum(saved[p] for p in held))
    freezing = sum(lengths[p] * (1 / less) for p, less in saved.items())
    solver.Minimize(_FIRST * end - freezing)
    written()
    status = solver.Solve()
    if status != solver.OPTIMAL:
        raise RuntimeError(f'GLOP ended with status {status}')
    ratios = {
        p: (lengths[p].ub() - lengths[p].solution_value()) / less for p, less in saved.items()
    }
    taken = end.solution_value()
    return Freezing(taken, taken, {p: min(max(r, 0.0), 1.0) for p, r in ratios.items()})


FORMAT = 'megatron_zbpp.freeze/1'
UNIT = 100  # steps
_LEAST = 30  # steps of monitoring
_REDRAWN = 10  # steps
_BACK = 0.1  # weight in the draw of the hindmost layer of the first stage; the front one has 1


@dataclass(frozen=True)
class FreezePlan:
    """Shares of weight gradients that each pass leaves out, and when that begins."""

    schedule: Schedule  # that it is for
    ratios: tuple[tuple[Pass, float], ...]  # by pass: what W leaves out, from 0 to 1
    makespan: float  # of a batch, predicted, in the unit of the costs that it was made for
    without: float  # the same without freezing
    warm_up: int = UNIT  # steps without freezing before monitoring, at least one
    unit: int = UNIT  # steps of monitoring, and half of those in which shares grow
    seed: int = 0  # of the draws
    _by_key: Mapping[tuple[int, int], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ('warm_up', 'unit'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} {getattr(self, name)}: give steps, 1 or more')
        own = {p for order in self.schedule.passes for p in order}
        for p, ratio in self.ratios:
            if p not in own or p.kind not in self.schedule.graph.doers[W]:
                raise ValueError(f'ratios: {p} is no pass of {self.schedule.name} with weights')
            if not 0 <= ratio <= 1:
                raise ValueError(f'ratios: {ratio} of {p} is no share: give a number from 0 to 1')
        found = {(p.stage, p.microbatch): ratio for p, ratio in self.ratios}
        object.__setattr__(self, '_by_key', found)

    @classmethod
    def of(
        cls, schedule: Schedule, found: Freezing, warm_up: int = UNIT, unit: int = UNIT
    ) -> FreezePlan:
        """Return the plan of what `freeze` found for `schedule`."""
        ratios = tuple(sorted((p, ratio) for p, ratio in found.ratios.items() if ratio > 0))
        return cls(schedule, ratios, found.makespan, found.without, warm_up, unit)

    @property
    def monitoring(self) -> range:
        """Steps that are measured without freezing."""
        return range(self.warm_up, self.warm_up + max(self.unit, _LEAST))

    @property
    def full(self) -> int:
        """The first step with the whole shares."""
        return max(self.warm_up + 3 * self.unit, self.monitoring.stop)

    @cached_property
    def stages(self) -> tuple[float, ...]:
        """Mean freeze ratio of each stage over its microbatches."""
        sums = [0.0] * self.schedule.num_stages
        for p, ratio in self.ratios:
            sums[p.stage] += ratio
        return tuple(total / self.schedule.num_microbatches for total in sums)

    def share(self, step: int) -> float:
        """Return the fraction of the planned ratios that a step freezes, from 0 to 1."""
        start = self.monitoring.stop
        if step < start:
            return 0.0
        return 1.0 if step >= self.full else (step - start) / (self.full - start)

    def left_out(self, step: int, stage: int, microbatch: int, count: int) -> frozenset[int]:
        """Return the numbers of the weight gradients that a pass leaves out.

        There are `count` of them, the last layer's first.
        """
        ratio = self._by_key.get((stage, microbatch), 0.0) * self.share(step)
        last = stage == self.schedule.num_stages - 1
        number = min(round(ratio * count), count - 1 if last else count)
        if number <= 0:
            return frozenset()
        chance = Random(f'{self.seed} {step // _REDRAWN} {stage} {microbatch}')
        weights = [1.0] * count
        if not stage and count > 1:
            weights = [_BACK + (1 - _BACK) * at / (count - 1) for at in range(count)]
        # the largest of u^(1/w) are a draw by weights, without replacement
        keys = [chance.random() ** (1 / weight) for weight in weights]
        return frozenset(sorted(range(count), key=lambda at: -keys[at])[:number])

    def to_json(self) -> str:
        """Return one JSON object; `from_json` reads it back to an equal value."""
        ratios = {str(p): ratio for p, ratio in self.ratios}
        schedule = json.loads(self.schedule.to_json())
        values = self.makespan, self.without, self.warm_up, self.unit, self.seed
        own = dict(zip(_PLAIN, values, strict=True))
        return json.dumps({'format': FORMAT, 'schedule': schedule, 'ratios': ratios, **own})

    @classmethod
    def from_json(cls, text: str) -> FreezePlan:
        """Return the plan that `to_json` wrote."""
        data: Any = strict_json.loads(text)
        strict_json.require(data, _FIELDS)
        strict_json.require(data['ratios'], {}, dict.fromkeys(data['ratios'], strict_json.number))
        return cls(
            Schedule.from_object(data['schedule']),
            tuple(sorted((Pass.parse(name), ratio) for name, ratio in data['ratios'].items())),
            *map(data.__getitem__, _PLAIN),
        )


def plan_of(file: object) -> FreezePlan:
    """Return the plan, read if the path of a file is given."""
    if isinstance(file, FreezePlan):
        return file
    if not isinstance(file, str | Path):
        raise ValueError(f'freeze is {file!r}: give the path of what zbpp freeze -o wrote, or None')
    try:
        return files.read(file, FreezePlan.from_json, 'what zbpp freeze -o wrote')
    except ValueError as error:
        raise ValueError(f'{error}: give what zbpp freeze -o wrote') from error


_PLAIN = ('makespan', 'without_freezing', 'warm_up', 'unit', 'seed')
_FIELDS = {
    'format': strict_json.one_of(FORMAT),
    'schedule': strict_json.anything,
    'ratios': strict_json.object_of(strict_json.anything, 'passes and shares'),
    **dict.fromkeys(('makespan', 'without_freezing'), strict_json.number),
    **dict.fromkeys(('warm_up', 'unit', 'seed'), strict_json.integer),
}
