"""Measurements of all ranks of a job, made into costs to plan for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from megatron_zbpp.analysis.fit_costs import full_rank, measured_costs, middle, with_bytes
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.runtime.clock import USABLE
from megatron_zbpp.runtime.groups import gather_objects
from megatron_zbpp.runtime.measure import Iteration

WARM_UP = 2  # iterations that are slower than others


@dataclass(frozen=True)
class Measured:
    """One rank's measurements of an iteration."""

    costs: Costs  # of all stages of its pipeline; times only
    makespan: float  # of its pipeline, in seconds
    held: Mapping[int, tuple[float, float]]  # `Iteration.held`, of its own stages
    spare: int | None  # bytes that it never needed; None where nobody counts them
    rank: int  # in the pipeline
    ranks: tuple[int, ...] = ()  # of the job, in its pipeline


def measured(iteration: Iteration) -> list[Measured]:
    """Return the measurements of an ended iteration by all ranks of the job: a collective."""
    timeline = iteration.gather().timeline
    own = Measured(
        measured_costs(timeline),
        timeline.makespan,
        iteration.held(),
        iteration.clock.spare(),
        dist.get_rank(iteration.pp_group),
        tuple(dist.get_process_group_ranks(iteration.pp_group)),
    )
    return gather_objects(own)


def merge_measurements(
    found: Sequence[Measured], schedule: Schedule, limit: float | None
) -> tuple[Costs, float, float | None]:
    """Return costs to plan for; the limit that memory allows; bytes of a full rank's activation.

    `limit` is in activations of one microbatch on a full rank; None: as many as there are pipeline
    ranks, what 1F1B holds, or as much as `schedule` holds. The bytes are None where no rank counts
    them; what waits for W then counts as F's.
    """
    placement = schedule.placement
    costs = middle([each.costs for each in found])
    by_stage: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for each in found:
        for stage, pair in each.held.items():
            by_stage[stage].append(pair)
    held = {
        stage: tuple(map(median, zip(*pairs, strict=True))) for stage, pairs in by_stage.items()
    }
    full = full_rank(placement, held)
    costs = costs if full is None else with_bytes(costs, full, held)
    peaks = peak(schedule, costs)
    limit = max(placement.num_ranks, *peaks) if limit is None else limit
    if full is None:
        return costs, limit, None
    room = [(peaks[each.rank], each.spare) for each in found if each.spare is not None]
    return costs, min([limit, *(most + USABLE * spare / full for most, spare in room)]), full
