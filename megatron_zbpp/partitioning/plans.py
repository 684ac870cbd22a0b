"""`partition`: layers, devices and m in; a plan that Megatron can run out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.formats import BYTES, MANY, Units, memory_of_plan
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.partitioning.bounds import Bounds
from megatron_zbpp.partitioning.layers import Devices, Layers
from megatron_zbpp.partitioning.search import PartitionSearch, Ranked, rank, schedule_of
from megatron_zbpp.partitioning.space import Partition, Space, parameters_held, stage_costs
from megatron_zbpp.partitioning.strategies import STRATEGIES
from megatron_zbpp.schedules import find


@dataclass(frozen=True)
class PartitionPlan:
    """A partition, where its stages are, and their schedule."""

    schedule: Schedule  # checked
    cuts: tuple[int, ...]  # layers of each stage in model order, embedding and loss counted
    # the device of each rank of the schedule. Where devices differ, these are Megatron's ranks, of
    # which the last has the loss
    device_order: tuple[int, ...]
    layout: str  # for `--pipeline-model-parallel-layout`
    costs: Costs  # of the stages on their devices
    parameters: tuple[float, ...]  # that each rank holds, in the same unit as its activations
    objective: str  # 'makespan', 'window' or 'period'
    value: float  # by `objective`
    lower_bound: float  # no allowed partition takes less
    # value of the even split with 1F1B on the devices as they are named, and the most that a rank
    # holds by that, as `peak_activations`; None: it does not fit, or there are too few layers
    even: float | None
    even_peak: float | None
    repeats: bool  # True if the same inputs give the same plan again

    @property
    def timeline(self) -> Timeline:
        """The schedule as predicted."""
        return simulate(self.schedule, self.costs)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Most that each rank holds, in the unit of the layers' `activation`."""
        return tuple(peak(self.schedule, self.costs))

    @property
    def gap(self) -> float:
        """The most that the value may be above the optimum, as a share of the bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def units(self) -> Units:
        """Units of its numbers: bytes, where ranks hold as many as no number of activations."""
        held = zip(self.peak_activations, self.parameters, strict=True)
        most = max(peak + static for peak, static in held)
        return Units('units of the layers', BYTES if most >= MANY else 'units of the layers')

    def facts(self, layers: Layers | None = None, devices: Devices | None = None) -> dict[str, Any]:
        """Return the fields of `zbpp partition --json`, as a plan's file has them, with inputs."""
        timeline = self.timeline
        inputs = {'layers': layers, 'devices': devices}
        return {
            'makespan': timeline.makespan,
            'window': max(timeline.windows),
            'lower_bound': self.lower_bound,
            'cuts': self.cuts,
            'device_order': self.device_order,
            'layout': self.layout,
            'peak_activations': self.peak_activations,
            'schedule': json.loads(self.schedule.to_json()),
            **memory_of_plan(self.costs, self.units),
            **{name: json.loads(own.to_json()) for name, own in inputs.items() if own is not None},
        }


class PartitionInterrupted(KeyboardInterrupt):
    """Ctrl-C while partitioning."""

    def __init__(self, best: PartitionPlan) -> None:
        super().__init__()
        self.best = best  # plan by then


def partition(
    layers: Layers,
    devices: Devices | int,
    num_microbatches: int,
    *,
    placements: Sequence[Placement] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    objective: str = 'makespan',
    fused: bool = False,
    keep_order: bool = False,
    schedules: Sequence[str] = (),
    exact: bool = False,
    seconds: float = 60.0,
    top: int = 32,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> PartitionPlan:
    """Return the best partition of the layers, with placement, order of devices and schedule.

    Args:
        layers: of the model.
        devices: of the pipeline; or how many that are alike, their links free.
        num_microbatches: m.
        placements: that may be used; default: a loop of one chunk, a V, and a loop of two chunks,
            as far as there are layers for them.
        memory_limit: most that a rank may hold, or one limit a device, in the unit of the layers'
            `activation`; its parameters count, as they do in the `memory` of devices.
        objective: 'makespan' while ranks wait for each other between iterations, 'window' where
            they do not, 'period' for asynchronous training: the work of the busiest rank.
        fused: whether B and W run as one; then the schedule is a named one.
        keep_order: whether device r must be rank r.
        schedules: names of those to use, which are then not improved; default: plan.
        exact: whether to go on until the best is proven.
        seconds: at most, where that is not asked for.
        top: partitions that are kept for planning.
        seed: another one searches elsewhere.
        progress: called now and then with the share of the time that is spent.

    Raises:
        PartitionInterrupted: by Ctrl-C; it has the best plan by then.
        ValueError: nothing fits, or a value that makes no sense.
    """
    if isinstance(devices, int):
        devices = Devices.alike(devices)
    allowed = default_placements(layers, len(devices)) if placements is None else placements
    space = Space(
        layers, devices, num_microbatches, allowed, memory_limit, objective, fused, keep_order
    )
    if not space.alike:
        loss_last = tuple(
            own.reversed() if own.num_ranks > 1 and own.only_route[-1] == 0 else own
            for own in space.placements
        )
        space = replace(space, placements=loss_last)
    for name in schedules:
        if find(name).num_routes > 1:
            raise ValueError(
                f'{name} runs both ways, and a partition is for one: take a schedule of one route, '
                'such as zb-v'
            )
        if find(name).asynchronous:
            raise ValueError(
                f'{name} is asynchronous, and a partition is for one iteration: take a '
                'synchronous schedule, such as zb-v'
            )
    search = PartitionSearch(space, tuple(schedules), top, seconds, seed, progress)
    found, bound = search.find(exact)
    made = _plan(space, found, bound, search.repeats)
    if search.interrupted:
        raise PartitionInterrupted(made)
    return made


def partition_by(strategy: str, space: Space) -> tuple[PartitionPlan, str]:
    """Return the choice of a strategy, on one device a stage, and its own plan in words.

    The space has a loop of one chunk a rank among its placements.
    """
    choice = STRATEGIES[strategy](space)
    found = rank(space, choice.partition)
    if found is None:
        raise ValueError(
            f'{choice.estimate}; of one device a stage, {choice.partition.cuts}, a rank lacks the '
            'memory for a microbatch: leave --strategy out'
        )
    bound = min(found.value, Bounds(space).overall)
    return _plan(space, found, bound, repeats=True), choice.estimate


def default_placements(layers: Layers, num_ranks: int) -> list[Placement]:
    """Return a loop, and with layers enough a V and a loop of two chunks a rank."""
    more = [Placement.v(num_ranks), Placement.loop(num_ranks, 2)]
    room = num_ranks > 1 and len(layers.splits()) + 1 >= 2 * num_ranks
    return [Placement.loop(num_ranks), *(more if room else [])]


def _plan(space: Space, best: Ranked, bound: float, repeats: bool) -> PartitionPlan:
    where = best.partition
    even, even_peak = _even(space)
    return PartitionPlan(
        schedule=schedule_of(best),
        cuts=where.cuts,
        device_order=where.order,
        layout=space.layers.text(where.cuts),
        costs=stage_costs(space.layers, space.devices, where),
        parameters=parameters_held(space.layers, where),
        objective=space.objective,
        value=best.value,
        lower_bound=bound,
        even=even,
        even_peak=even_peak,
        repeats=repeats,
    )


def _even(space: Space) -> tuple[float, float] | tuple[None, None]:
    try:
        even: Partition = space.even()
    except ValueError:
        return None, None
    known = rank(replace(space, fused=True), even, ('1f1b',), draft=False)
    if known is None:
        return None, None
    costs = stage_costs(space.layers, space.devices, even)
    return known.value, max(peak(schedule_of(known), costs))
