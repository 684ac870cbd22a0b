"""`auto`: measures the schedule that runs, plans a better one meanwhile, and switches to it.

All ranks of the job measure times, and on a GPU bytes; the first one plans, once for all, in a
process of its own, while training goes on. Every switch is announced by a broadcast, so that all
ranks make it together.

Then the first rank looks for a better partition of the layers, too. Layers cannot move while a run
lasts: the partition that is found becomes a plan's file, for the next start.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.gain import RIVAL, makespan_of
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests.background_search import BackgroundSearch, partition_text, schedule_text
from megatron_zbpp.guests.base import Change, Guest, ModelLayers, Run
from megatron_zbpp.guests.measurements import WARM_UP, Measured, measured, merge_measurements
from megatron_zbpp.ir import B, F, Placement, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.plan_costs import in_reverse, message_times
from megatron_zbpp.partitioning.fitting import fit_layers, measured_devices, slow_ranks
from megatron_zbpp.partitioning.layers import Devices, Layers
from megatron_zbpp.partitioning.space import Partition, stage_costs
from megatron_zbpp.planner.cache import default_folder
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.techniques.vocabulary.place import WHOLE, has_shards, rival_costs

_WORTH = 0.01  # the least gain that a new start is worth


@dataclass(frozen=True)
class MeasuredRun:
    """The start of a search for a partition."""

    layers: Layers  # whose costs are fitted to the times of stages that were measured
    error: float  # the largest of a stage, as a share
    # of the pipeline, those of slower ranks with a factor; with the links' latency
    devices: Devices
    now: float  # what an iteration takes with the layers where they are, by those costs, in seconds

    @property
    def unequal(self) -> str:
        """Ranks slower or faster than others at the same layers, for messages; '' if none is."""
        return ', '.join(
            f'rank {rank} takes {device.factors[0]:.3g} times as long'
            for rank, device in enumerate(self.devices.devices)
            if device.factors[0] != 1
        )


def fit_layers_to_run(
    layout: str, schedule: Schedule, costs: Costs, objective: str, layers_alike: bool = True
) -> MeasuredRun:
    """Fit costs of layers and slowdowns of ranks to the measured times of the stages.

    Where layers of a letter are not alike, no rank is taken for a slower one.
    """
    placement, stages = schedule.placement, layout.split('|')
    devices = measured_devices(stages, placement, costs, layers_alike)
    factors = [devices.devices[rank].factors[0] for rank in placement.only_route]
    layers, error = fit_layers([(layout, costs)], factors=factors)
    where = Partition(placement, tuple(map(len, stages)), tuple(range(placement.num_ranks)))
    fitted = stage_costs(layers, devices, where)
    return MeasuredRun(layers, error, devices, simulate(schedule, fitted).value(objective))


@dataclass(frozen=True)
class Repartition:
    """A search for a better partition, on the rank that plans."""

    search: BackgroundSearch  # beside the training
    measured_run: MeasuredRun  # what it starts from
    objective: str  # 'makespan' or 'window'
    say: Callable[[str], None]  # tells the user

    @classmethod
    def start(
        cls,
        measured_run: MeasuredRun,
        num_microbatches: int,
        limit: float | None,
        seconds: float,
        objective: str,
        say: Callable[[str], None],
    ) -> Repartition | None:
        """Start a search within `limit` activations a rank; None: it fails, as the user is told."""
        inputs = measured_run.layers, measured_run.devices, num_microbatches, limit
        call = partial(partition_text, *inputs, seconds, objective)
        search = BackgroundSearch.start('the search for a partition', call, seconds, say)
        return None if search is None else cls(search, measured_run, objective, say)

    def finished(self) -> bool:
        """Return True once the search has ended; tell the user its result, once."""
        if not self.search.ended():
            return False
        nothing = 'auto: no other partition of the layers was found, see above'
        text = self.search.answer()
        self.say(self._report(text) if text else nothing)
        return True

    def end(self) -> None:
        """Cancel the search."""
        self.search.end()

    def _report(self, text: str) -> str:
        """Write the plan's file, if it is worth a new start; return words for the user."""
        plan, measured_run = json.loads(text), self.measured_run
        expected = plan[self.objective]
        gain = 1 - expected / measured_run.now if measured_run.now else 0.0
        fit = f'layers fitted to stages within {measured_run.error:.1%}'
        fit += f'; {measured_run.unequal} for its layers' if measured_run.unequal else ''
        if gain < _WORTH:
            return f'auto: no other partition of the layers gains {_WORTH:.0%} ({fit})'
        times = f'{expected * 1e3:.1f} ms instead of {measured_run.now * 1e3:.1f} ms predicted'
        holds = f'it holds {max(plan["peak_activations"]):.3g} activations'
        what = f'auto: the partition {plan["layout"]} would be {gain:.1%} faster'
        what += f' ({times}, {fit}; {holds})'
        try:
            path = _written(text)
        except OSError as error:
            return f'{what}; its plan could not be written ({error})'
        return (
            f'{what}; layers do not move while a run lasts: start again from a checkpoint with '
            f'--pipeline-schedule-file {path}'
        )


def _written(text: str) -> Path:
    plans = default_folder()
    folder = Path() if plans is None else plans.parent / 'partitions'
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f'{sha256(text.encode()).hexdigest()[:16]}.json'
    path.write_text(text, encoding='utf-8')
    return path.absolute()


_UNKNOWN = ModelLayers(None, alike=True)
_OF_SIZE = (  # fields that are known for one number of microbatches
    '_seen _spans _found _planner _search planned costs _original _measured_before _predicted '
    '_settled'
).split()
_WAITING, _KEEP = '', 'keep'  # what the planning rank may say instead of a schedule


@dataclass
class AutoPlan(Guest):
    """Follows the iterations of one rank, and says when to switch to what."""

    profile_iters: int = 5  # that are measured
    # in activations of one microbatch on a full rank; None: as many as there are pipeline ranks,
    # what 1F1B holds, or as much as the schedule that is measured. Less where the device lacks room
    memory_limit: float | None = None
    seconds: float = 30.0  # to plan, at most
    objective: str = 'makespan'  # or 'window', where ranks do not wait between iterations
    say: Callable[[str], None] = rank_log.info
    planned: Schedule | None = None  # the schedule that was switched to
    costs: Costs | None = None  # that it was planned for
    # of the model: where their layout is known, a better one is looked for; where they are alike, a
    # rank on which they take longer is taken for a slower one
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
        """True while activations are counted in bytes: until the first plan."""
        return not self._settled and self.planned is None

    def starts(self, describe: Callable[[], ModelLayers]) -> None:
        self.layers = describe()

    def after(self, iteration: Iteration, run: Run) -> Change | None:
        """Return the schedule to run now, in ranks of `iteration`; None: the same. A collective."""
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
            everywhere = measured(iteration)
            self._found += everywhere
            self._spans.append(max(each.makespan for each in everywhere))
            if len(self._spans) == self.profile_iters and self.planned is None:
                self._start(schedule)
            return None
        if self.planned is not None:
            return self._compare(schedule)
        return self._ask(schedule)

    def _begin(self, num_microbatches: int) -> None:
        self._sizes[self._num_microbatches] = {name: getattr(self, name) for name in _OF_SIZE}
        other = AutoPlan()
        known = self._sizes.pop(num_microbatches, {name: getattr(other, name) for name in _OF_SIZE})
        self._num_microbatches = num_microbatches
        vars(self).update(known)

    def _start(self, schedule: Schedule) -> None:
        self.costs, limit, full = merge_measurements(self._found, schedule, self.memory_limit)
        if dist.get_rank() != 0:
            return
        unused = [each.spare for each in self._found if each.spare is not None]
        spare = f'; {min(unused) / 2**30:.3g} GiB or more never needed' if unused else ''
        words = _words(self.costs, schedule.placement, full)
        self.say(f'auto: {words}; plans within {limit:.3g} activations{spare}')
        pipelines = [(each.ranks, each.costs) for each in self._found if each.rank == 0]
        for rank, times in slow_ranks(pipelines, schedule.placement).items():
            self.say(
                f'auto: rank {rank} takes {times:.3g} times as long as other replicas usually do '
                'for the same stages: all of them wait for it'
            )
        start, costs = schedule, self.costs
        if _is_reversed(schedule):
            start, costs = schedule.reversed(), in_reverse(costs, schedule.num_ranks)
        self._search = partial(schedule_text, start, costs, limit, self.seconds, self.objective)
        self._launch()

    def _launch(self) -> None:
        """Start the pending search, unless one for another number of microbatches runs."""
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
        planned = planned.reversed() if _is_reversed(schedule) else planned
        expected, known = (
            simulate(each, costs).value(self.objective) for each in (planned, schedule)
        )
        times = f'{known * 1e3:.1f} ms with {schedule.name}, {expected * 1e3:.1f} ms planned'
        if self.objective == 'makespan' and (
            rival := makespan_of(RIVAL, schedule, rival_costs(schedule, costs))
        ):
            times += f', {rival * 1e3:.1f} ms with {RIVAL + WHOLE * has_shards(schedule)}'
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
        """Stop measuring and planning; on the first rank, search for a better partition."""
        self._settled = True
        if dist.get_rank() != 0 or self.layers.layout is None or self.costs is None:
            return
        if self._partition is not None:
            return  # one that was begun for another number of microbatches
        ran = self._original or schedule
        unknown = 'output layer on all ranks' if has_shards(ran) else 'cells'
        if has_shards(ran) or ran.together:
            self.say(f'auto: looks for no other partition of the layers: it knows no {unknown}')
            return
        measured_run = fit_layers_to_run(
            self.layers.layout, schedule, self.costs, self.objective, self.layers.alike
        )
        # a proposal may take all the room that there is; what runs keeps to what 1F1B holds
        asked = inf if self.memory_limit is None else self.memory_limit
        _, room, _ = merge_measurements(self._found, schedule, asked)
        self._partition = Repartition.start(
            measured_run,
            schedule.num_microbatches,
            room if room < inf else None,
            self.seconds,
            self.objective,
            self.say,
        )


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


def _is_reversed(schedule: Schedule) -> bool:
    """Return True if the schedule runs with its ranks reversed, so that loss is on the last."""
    return schedule.placement.only_route[0] != 0
