"""`auto`: measures the schedule that runs, plans a better one meanwhile, and switches to it.

All ranks of the job measure times, and on a GPU bytes; the first one plans, once for all, in a
process of its own, while training goes on. Every switch is announced by a broadcast, so that all
ranks make it together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

import torch.distributed as dist

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.gain import RIVAL, makespan_of
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests.autotune.background import BackgroundSearch, schedule_text
from megatron_zbpp.guests.autotune.repartition import Repartition, look
from megatron_zbpp.guests.base import Change, Guest, ModelLayers, Run
from megatron_zbpp.guests.measurements import WARM_UP, Measured, measured, merge_measurements
from megatron_zbpp.ir import B, F, Placement, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.plan_costs import in_reverse, message_times
from megatron_zbpp.partitioning.fitting import slow_ranks
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.observe.measure import Iteration
from megatron_zbpp.techniques.vocabulary.whole import WHOLE, has_shards, rival_costs

_UNKNOWN = ModelLayers(None, alike=True)
_OF_SIZE = (  # what is known for one number of microbatches
    '_seen',
    '_spans',
    '_found',
    '_planner',
    '_search',
    'planned',
    'costs',
    '_original',
    '_measured_before',
    '_predicted',
    '_settled',
)
_WAITING, _KEEP = '', 'keep'  # what the planning rank may say instead of a schedule


@dataclass
class AutoPlan(Guest):
    """Follows the iterations of one rank, and says when to switch to what.

    Args:
        profile_iters: how many iterations to measure.
        memory_limit: in activations of one microbatch on a full rank; None: as many as there are
            pipeline ranks, what 1F1B holds, or as much as the schedule that is measured. Less where
            the device has no room for so many.
        seconds: to plan, at most.
        objective: what to plan for: 'makespan' where all ranks wait for each other between
            iterations, 'window' where they do not.
        say: tells the user.

    Attributes:
        planned: the schedule that was switched to.
        costs: that it was planned for.
        layers: of the model: where their layout is known, a better one is looked for; where they
            are alike, a rank on which they take longer is taken for a slower one.
    """

    profile_iters: int = 5
    memory_limit: float | None = None
    seconds: float = 30.0
    objective: str = 'makespan'
    say: Callable[[str], None] = rank_log.info
    planned: Schedule | None = None
    costs: Costs | None = None
    layers: ModelLayers = _UNKNOWN
    _num_microbatches: int = 0
    _sizes: dict[int, dict[str, Any]] = field(default_factory=dict)
    _seen: int = 0
    _spans: list[float] = field(default_factory=list)
    _found: list[Measured] = field(default_factory=list)
    _planner: BackgroundSearch | None = None
    _search: partial[str] | None = None
    _original: Schedule | None = None
    _measured_before: list[float] = field(default_factory=list)
    _predicted: float = 0.0
    _settled: bool = False
    _partition: Repartition | None = None

    @property
    def counting(self) -> bool:
        """True while bytes are worth counting: until something is planned."""
        return not self._settled and self.planned is None

    def starts(self, describe: Callable[[], ModelLayers]) -> None:
        """Take note of which layers the model is."""
        self.layers = describe()

    def after(self, iteration: Iteration, run: Run) -> Change | None:
        """Return what to run now, in the ranks of `iteration`; None: the same. A collective."""
        schedule = self._next(iteration)
        return None if schedule is None else Change(self.costs, schedule)

    def _next(self, iteration: Iteration) -> Schedule | None:
        schedule = iteration.schedule
        if schedule.num_microbatches != self._num_microbatches:  # the batch size has changed
            self._begin(schedule.num_microbatches)
        if self._partition is not None and self._partition.finished():
            self._partition = None
        if self._settled or schedule.num_ranks == 1:
            return None
        self._seen += 1
        if self._seen <= WARM_UP:
            return None
        if len(self._spans) < self.profile_iters:
            self._measure(iteration)
            return None
        if self.planned is not None:
            return self._compare(schedule)
        return self._ask(schedule)

    def _begin(self, num_microbatches: int) -> None:
        self._sizes[self._num_microbatches] = {name: getattr(self, name) for name in _OF_SIZE}
        other = AutoPlan()
        known = self._sizes.pop(num_microbatches, {name: getattr(other, name) for name in _OF_SIZE})
        self._num_microbatches = num_microbatches
        for name, value in known.items():
            setattr(self, name, value)

    def _measure(self, iteration: Iteration) -> None:
        everywhere = measured(iteration)
        self._found += everywhere
        self._spans.append(max(each.makespan for each in everywhere))
        if len(self._spans) == self.profile_iters and self.planned is None:
            self._start(iteration.schedule)

    def _start(self, schedule: Schedule) -> None:
        """Start the planner on the first rank."""
        self.costs, limit, full = merge_measurements(self._found, schedule, self.memory_limit)
        if dist.get_rank() != 0:
            return
        unused = [each.spare for each in self._found if each.spare is not None]
        spare = f'; {min(unused) / 2**30:.3g} GiB or more never needed' if unused else ''
        words = _words(self.costs, schedule.placement, full)
        self.say(f'auto: {words}; plans within {limit:.3g} activations{spare}')
        placement = schedule.placement
        pipelines = [(each.ranks, each.costs) for each in self._found if each.rank == 0]
        for rank, times in slow_ranks(pipelines, placement).items():
            self.say(
                f'auto: rank {rank} takes {times:.3g} times as long as other replicas usually do '
                'for the same stages: all of them wait for it'
            )
        start, costs = schedule, self.costs
        if _mirrored(schedule):
            start, costs = schedule.reversed(), in_reverse(costs, schedule.num_ranks)
        self._search = partial(schedule_text, start, costs, limit, self.seconds, self.objective)
        self._launch()

    def _launch(self) -> None:
        """Start the search that is to be, unless one for another number of microbatches runs."""
        others = [each['_planner'] for each in self._sizes.values()]
        if self._search is not None and all(each is None or each.ended() for each in others):
            search, self._search = self._search, None
            self._planner = BackgroundSearch.start('the planner', search, self.seconds, self.say)

    def _ask(self, schedule: Schedule) -> Schedule | None:
        said = [self._poll(schedule) if dist.get_rank() == 0 else _WAITING]
        dist.broadcast_object_list(said, src=0)
        if said[0] == _WAITING:
            return None
        if said[0] == _KEEP:
            self._settle(schedule)
            return None
        self.planned = replace(Schedule.from_json(said[0]), costs=self.costs)
        self._original, self._measured_before = schedule, self._spans
        self._seen, self._spans = 0, []  # measured anew
        return self.planned

    def _poll(self, schedule: Schedule) -> str:
        self._launch()
        planner, costs = self._planner, self.costs
        assert costs is not None  # `_start` has them
        if self._search is not None or (planner is not None and not planner.ended()):
            return _WAITING
        text = None if planner is None else planner.answer()
        try:
            planned = Schedule.from_json(text or '')
            check(planned)
        except ValueError as error:
            no_schedule = f'its answer is no schedule: {error}'.splitlines()[0]
            why = 'see above' if text is None else no_schedule
            self.say(f'auto: planning failed, {why}; {schedule.name} stays')
            return _KEEP
        planned = planned.reversed() if _mirrored(schedule) else planned
        expected, known = (
            simulate(each, costs).value(self.objective) for each in (planned, schedule)
        )
        times = f'{known * 1e3:.1f} ms with {schedule.name}, {expected * 1e3:.1f} ms planned'
        times += _rival(schedule, costs) if self.objective == 'makespan' else ''
        if expected >= known:
            self.say(f'auto: nothing better found (simulated: {times}); {schedule.name} stays')
            return _KEEP
        self._predicted = 1 - expected / known
        holds = max(peak(planned, costs))
        self.say(
            f'auto: switches to a planned schedule, which holds {holds:.3g} activations '
            f'(simulated: {times}, {self._predicted:+.1%} predicted)'
        )
        return planned.to_json()

    def _compare(self, schedule: Schedule) -> Schedule | None:
        before, now = median(self._measured_before), median(self._spans)
        gained = 1 - now / before
        lost = min(self._spans) > max(self._measured_before)
        back = self._original if lost else None
        if dist.get_rank() == 0:
            change = f'{gained:.1%} faster' if gained >= 0 else f'{-gained:.1%} slower'
            self.say(
                f'auto: measured {before * 1e3:.1f} ms before, {now * 1e3:.1f} ms with the '
                f'planned schedule ({change}; {self._predicted:.1%} faster was predicted)'
                + (f': goes back to {back.name}' if back else '')
            )
        self._settle(back or schedule)
        return back

    def _settle(self, schedule: Schedule) -> None:
        """Measure and plan no more; on the first rank, look where the layers had better be."""
        self._settled = True
        if dist.get_rank() != 0 or self.layers.layout is None or self.costs is None:
            return
        if self._partition is not None:
            return  # one that was begun for another number of microbatches
        if unknown := _unknown_to_partitions(self._original or schedule):
            self.say(f'auto: looks for no other partition of the layers: it knows no {unknown}')
            return
        looked = look(self.layers.layout, schedule, self.costs, self.objective, self.layers.alike)
        # a proposal may take all the room that there is; what runs keeps to what 1F1B holds
        asked = inf if self.memory_limit is None else self.memory_limit
        _, room, _ = merge_measurements(self._found, schedule, asked)
        self._partition = Repartition.start(
            looked,
            schedule.num_microbatches,
            room if room < inf else None,
            self.seconds,
            self.objective,
            self.say,
        )


def _rival(schedule: Schedule, costs: Costs) -> str:
    makespan = makespan_of(RIVAL, schedule, rival_costs(schedule, costs))
    name = RIVAL + WHOLE * has_shards(schedule)
    return f', {makespan * 1e3:.1f} ms with {name}' if makespan else ''


def _unknown_to_partitions(schedule: Schedule) -> str:
    if has_shards(schedule):
        return 'output layer on all ranks'
    return 'cells' if schedule.together else ''


def _words(costs: Costs, placement: Placement, full: float | None) -> str:
    n = costs.num_stages
    times = {kind: costs.times[kind] for kind in (F, B, W)}
    times |= {kind: own[n:] for kind, own in costs.times.items() if any(own[n:])}  # of shards
    parts = [f'{kind} {min(t) * 1e3:.3g} to {max(t) * 1e3:.3g} ms' for kind, t in times.items()]
    if costs.together != 1:
        parts.append(f'a forward and a backward as one {costs.together:.0%} of both')
    messages = [time for own in message_times(costs, placement).values() for time in own]
    ends = (f'{end(messages) * 1e3:.3g}' for end in (min, max))
    parts.append(f'messages {" to ".join(dict.fromkeys(ends))} ms')
    if full is not None:
        parts.append(f'an activation of a full rank {full / 2**20:.4g} MiB')
    return f'measured {", ".join(parts)}'


def _mirrored(schedule: Schedule) -> bool:
    return schedule.placement.only_route[0] != 0
