"""Leaves out the weight gradients that a plan of freezing names, step by step, and says so.

This changes what is learned. Nothing else here does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from statistics import median

from megatron_zbpp.guests.base import Guest, Run
from megatron_zbpp.ir import Schedule, W
from megatron_zbpp.partitioning.freeze_plans import FreezePlan
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.stage import Key

_COMPARED = 20  # steps with the whole shares, before the gain is told


class FreezeRun(Guest):
    """Follows a plan through a training, on one rank."""

    def __init__(self, plan: FreezePlan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.step = self.first = 0  # that runs; that a resumed training began with
        self.left_out = self.seen = 0  # weight gradients: left out so far; that could have been
        self._say = say
        self._phase = ''
        self._before: list[float] = []
        self._after: list[float] = []

    @property
    def skips_gradients(self) -> bool:
        """True if gradients are left out in this step."""
        return self.plan.share(self.step) > 0

    def refuses(self, schedule: Schedule) -> str | None:
        """Return why the plan does not fit `schedule`, whose ranks are Megatron's."""
        planned = self.plan.schedule
        if schedule.passes not in (planned.passes, planned.reversed().passes):
            return (
                f'freezing was planned for {planned.name} of {planned.num_ranks} ranks and '
                f'{planned.num_microbatches} microbatches, but {schedule.name} of '
                f'{schedule.num_ranks} and {schedule.num_microbatches} is to run: plan it anew '
                '(zbpp freeze -o)'
            )
        if all(p.kind != W for order in schedule.passes for p in order):
            return (
                f'{schedule.name} has no W passes, of which freezing leaves gradients out: take a '
                'schedule that has, such as zb-h1'
            )
        if any(p.slice for order in schedule.passes for p in order):
            return (
                f'{schedule.name} has slices, of whose weight gradients freezing would leave out '
                'the same ones: drop --pipeline-freeze, or take a schedule of whole sequences'
            )
        return None

    def fingerprint(self) -> Mapping[str, object]:
        return {'step resumed at': self.first}

    def join(self, run: Run) -> None:
        """Register as the source of the gradients that W passes leave out."""
        run.store.left_out = self

    def resume(self, step: int) -> None:
        self.step = self.first = step

    def before(self, step: int | None) -> None:
        self.step = self.step if step is None else step
        plan, phase = self.plan, 'growing' if self.step < self.plan.full else 'freezing'
        if self.step < plan.monitoring.stop:
            phase = 'warm-up' if self.step < plan.monitoring.start else 'monitoring'
        if phase == self._phase:
            return
        self._phase = phase
        shares = ', '.join(f'{share:.0%}' for share in plan.stages)
        self._say(
            {
                'warm-up': f'FREEZING IS ON: from step {plan.monitoring.stop} weight gradients '
                f'will be left out, by stage {shares} of them from step {plan.full}; losses will '
                'not be those of training without it',
                'monitoring': f'freezing: step {self.step}, nothing is frozen while times are '
                'measured',
                'growing': f'FREEZING: from step {self.step} weight gradients are left out; the '
                'training is another one from here on',
                'freezing': f'FREEZING: from step {self.step} by stage {shares} of the weight '
                'gradients are left out',
            }[phase]
        )

    def __call__(self, key: Key, count: int) -> Collection[int]:
        """Return the places of the weight gradients that are left out, of `count` of a key."""
        stage, microbatch, _ = key
        found = self.plan.left_out(self.step, stage, microbatch, count)
        self.seen += count
        self.left_out += len(found)
        return found

    def after(self, iteration: Iteration, run: Run) -> None:
        if self._phase == 'monitoring':
            self._before.append(iteration.extent().window)
        elif self._phase == 'freezing' and len(self._after) < _COMPARED:
            self._after.append(iteration.extent().window)
            if len(self._after) == _COMPARED and self._before:
                before, after = median(self._before), median(self._after)
                predicted = 1 - self.plan.makespan / self.plan.without if self.plan.without else 0.0
                self._say(
                    f'freezing: {before * 1e3:.1f} ms before, {after * 1e3:.1f} ms with it on this '
                    f'rank ({1 - after / before:.1%} less; {predicted:.1%} was predicted)'
                )
        self.step += 1
