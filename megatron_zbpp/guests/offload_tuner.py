"""`--pipeline-offload auto`: measures copies, and offloads as much as costs no time.

Everything that has the time goes while some iterations are measured: so what fits then fits. From
times of passes and copies comes k (PipeOffload, arXiv 2503.01328, section 3.1); all ranks have the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import torch.distributed as dist

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests.base import Change, Guest, Run
from megatron_zbpp.guests.measurements import WARM_UP, Measured, measured, merge_measurements
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, TRANSFERS
from megatron_zbpp.runtime.groups import gather_objects
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.techniques.base import copy_ratio
from megatron_zbpp.techniques.offload import FREE, offloaded


@dataclass
class OffloadTuner(Guest):
    """Follows the iterations of one rank, and reports the measured copy ratio once."""

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
