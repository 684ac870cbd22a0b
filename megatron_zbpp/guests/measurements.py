"""Measurements of all ranks of a job as costs to plan for, and the tuner of offload by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

import torch.distributed as dist

from megatron_zbpp.analysis.fit_costs import full_rank, measured_costs, middle, with_bytes
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests.base import Change, Guest, Run
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, TRANSFERS
from megatron_zbpp.runtime.clock import USABLE
from megatron_zbpp.runtime.groups import gather_objects
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.techniques.base import copy_ratio
from megatron_zbpp.techniques.offload import FREE, offloaded

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


@dataclass
class OffloadTuner(Guest):
    """`--pipeline-offload auto`: measures copies, and offloads as much as costs no time.

    Everything that has the time goes while some iterations are measured: so what fits then fits.
    From times of passes and copies comes k (PipeOffload, arXiv 2503.01328, section 3.1), which is
    reported once; all ranks have the same.
    """

    profile_iters: int = 5
    say: Callable[[str], None] = rank_log.info
    settled: bool = False  # whether it has measured
    _seen: int = 0
    _found: list[Measured] = field(default_factory=list)

    @property
    def counting(self) -> bool:
        """True while bytes are counted: until copies have been planned."""
        return not self.settled

    def after(self, iteration: Iteration, run: Run) -> Change | None:
        """Return the costs by which copies are planned now; None: no change. A collective."""
        if self.settled:
            return None
        self._seen += 1
        if self._seen <= WARM_UP:
            return None
        self._found += measured(iteration)
        if self._seen < WARM_UP + self.profile_iters:
            return None
        self.settled = True
        ways: dict[int, float] = {}
        for found in gather_objects(dict(run.copy_times())):
            ways |= {stage: max(seconds, ways.get(stage, 0.0)) for stage, seconds in found.items()}
        costs, room, _ = merge_measurements(self._found, iteration.schedule, inf)
        times = tuple(ways.get(stage, 0.0) for stage in range(costs.num_stages))
        costs = costs.with_times(**dict.fromkeys(TRANSFERS[HOST], times))
        if not any(times):
            self._tell('offload auto: nothing has left the device')
            return None
        schedule = iteration.schedule
        decided = self._decided(schedule, run.without_copies(schedule), costs, room)
        return None if decided is None else Change(decided)

    def _decided(self, runs: Schedule, base: Schedule, costs: Costs, room: float) -> Costs | None:
        ratio = copy_ratio(costs)
        planned = offloaded(base, FREE, costs)
        found = f'offload auto: k = {ratio:.2g} measured'
        share = 'all' if ratio <= 1 else f'the share 1/k, {1 / ratio:.0%},'
        fits = max(peak(planned, costs)) <= max(room, *peak(runs, costs))
        if not fits:
            planned, share = runs, 'all'
            found += ', but the device has no room for more'
        with_, without = (simulate(each, costs).makespan for each in (planned, base))
        holds, held = (max(peak(each, costs)) for each in (planned, base))
        self._tell(
            f'{found}: {share} that has the time goes to the host; simulated: '
            f'{with_ * 1e3:.4g} ms, {with_ / without - 1:+.1%} for it, and {holds:.3g} activations '
            f'of a full rank instead of {held:.3g}'
        )
        return costs if fits else None

    def _tell(self, message: str) -> None:
        if dist.get_rank() == 0:
            self.say(message)
