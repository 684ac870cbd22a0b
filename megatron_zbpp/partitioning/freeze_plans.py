"""A plan of freezing as a run follows it: TimelyFreeze (arXiv 2602.05754), phases and draws.

Steps of a warm-up freeze nothing; those of monitoring neither, their times are what freezing is
compared with; then the shares grow to what the linear programme says. In a pass of share r, r of
the n weight gradients that it has are left out: drawn anew every ten steps, by numbers that all
replicas have alike. In the first stage those of the front layers are drawn more often. The last
stage keeps one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

from megatron_zbpp.ir import Pass, Schedule, W, strict_json
from megatron_zbpp.partitioning.freezing import Freezing

FORMAT = 'megatron_zbpp.freeze/1'
UNIT = 100  # steps
_LEAST = 30  # steps of monitoring
_REDRAWN = 10  # steps
_BACK = 0.1  # weight in the draw of the hindmost layer of the first stage; the front one has 1


@dataclass(frozen=True)
class FreezePlan:
    """Shares of weight gradients that each pass leaves out, and when that begins.

    Attributes:
        schedule: that it is for.
        ratios: by pass: what W leaves out, from 0 to 1.
        makespan: of a batch, predicted, in the unit of the costs that it was made for.
        without: the same without freezing.
        warm_up: steps without freezing before monitoring, at least one.
        unit: steps of monitoring, and half of those in which shares grow.
        seed: of the draws.
    """

    schedule: Schedule
    ratios: tuple[tuple[Pass, float], ...]
    makespan: float
    without: float
    warm_up: int = UNIT
    unit: int = UNIT
    seed: int = 0
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
        """Return which of the weight gradients of a pass are left out.

        Args:
            step: of the training, from 0.
            stage: of the pass.
            microbatch: of the pass.
            count: how many there are, the last layer's first.
        """
        ratio = self._by_key.get((stage, microbatch), 0.0) * self.share(step)
        last = stage == self.schedule.num_stages - 1
        number = min(round(ratio * count), count - 1 if last else count)
        if number <= 0:
            return frozenset()
        chance = Random(f'{self.seed} {step // _REDRAWN} {stage} {microbatch}')
        # the largest of u^(1/w) are a draw by weights, without replacement
        keys = [chance.random() ** (1 / self._weight(stage, at, count)) for at in range(count)]
        return frozenset(sorted(range(count), key=lambda at: -keys[at])[:number])

    def _weight(self, stage: int, at: int, count: int) -> float:
        if stage or count < 2:
            return 1.0
        return _BACK + (1 - _BACK) * at / (count - 1)

    def to_json(self) -> str:
        """Return one JSON object; `from_json` reads it back to an equal value."""
        return json.dumps(
            {
                'format': FORMAT,
                'schedule': json.loads(self.schedule.to_json()),
                'ratios': {str(p): ratio for p, ratio in self.ratios},
                'makespan': self.makespan,
                'without_freezing': self.without,
                'warm_up': self.warm_up,
                'unit': self.unit,
                'seed': self.seed,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> FreezePlan:
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: `text` is none; the message names the field.
        """
        data: Any = strict_json.loads(text)
        strict_json.require(data, _FIELDS)
        strict_json.require(data['ratios'], {}, dict.fromkeys(data['ratios'], strict_json.number))
        return cls(
            Schedule.from_object(data['schedule']),
            tuple(sorted((Pass.parse(name), ratio) for name, ratio in data['ratios'].items())),
            data['makespan'],
            data['without_freezing'],
            data['warm_up'],
            data['unit'],
            data['seed'],
        )


_FIELDS = {
    'format': strict_json.one_of(FORMAT),
    'schedule': strict_json.anything,
    'ratios': strict_json.object_of(strict_json.anything, 'passes and shares'),
    'makespan': strict_json.number,
    'without_freezing': strict_json.number,
    'warm_up': strict_json.integer,
    'unit': strict_json.integer,
    'seed': strict_json.integer,
}
