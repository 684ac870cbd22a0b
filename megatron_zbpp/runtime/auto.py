"""`auto`: measures the schedule that runs, plans a better one meanwhile, and switches to it.

All ranks of the job measure; the first one plans, once for all, in a process of its own, while
training goes on. Every switch is announced by a broadcast, so that all ranks make it together.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import IO

import torch.distributed as dist

from megatron_zbpp.ir import Schedule
from megatron_zbpp.planning import worker
from megatron_zbpp.planning.costs import Costs
from megatron_zbpp.planning.fit import fit, latency, middle
from megatron_zbpp.planning.simulate import simulate
from megatron_zbpp.runtime.measure import Iteration

_WARM_UP = 2  # iterations that are slower than others
_WAITING, _KEEP = '', 'keep'  # what the planning rank may say instead of a schedule


def start_family(num_chunks: int | None) -> str:
    """The named schedule to measure under, which fixes the placement."""
    return {None: 'zb-v', 1: 'zb-h1', 2: 'zb-v'}.get(num_chunks, 'zb-interleaved')


@dataclass
class AutoPlan:
    """Follows the iterations of one rank, and says when to switch to what.

    Args:
        profile_iters: how many iterations to measure.
        memory_limit: in activations of one microbatch on a full rank; None: as many as there are
            pipeline ranks, what 1F1B holds.
        seconds: to plan, at most.
        objective: what to plan for: 'makespan' where all ranks wait for each other between
            iterations, 'window' where they do not.
        say: tells the user.

    Attributes:
        planned: the schedule that was switched to.
    """

    profile_iters: int = 5
    memory_limit: float | None = None
    seconds: float = 30.0
    objective: str = 'makespan'
    say: Callable[[str], None] = lambda message: print(message, file=sys.stderr, flush=True)
    planned: Schedule | None = None
    _num_microbatches: int = 0
    _seen: int = 0
    _spans: list[float] = field(default_factory=list)
    _found: list[Costs] = field(default_factory=list)
    _process: subprocess.Popen | None = None
    _answer: IO[str] | None = None
    _before: float = 0.0
    _settled: bool = False

    def after(self, iteration: Iteration) -> Schedule | None:
        """What to run from now on, in the ranks of `iteration`; None: the same. A collective.

        Args:
            iteration: that has ended, of training.
        """
        schedule = iteration.schedule
        if self._settled or schedule.num_ranks == 1:
            return None
        if schedule.num_microbatches != self._num_microbatches:  # the batch size has changed
            self._num_microbatches, self._seen = schedule.num_microbatches, 0
            self._spans, self._found = [], []
        self._seen += 1
        if self._seen <= _WARM_UP:
            return None
        if len(self._spans) < self.profile_iters:
            self._measure(iteration)
            return None
        if self.planned is not None:
            return self._compare()
        return self._ask(schedule)

    def _measure(self, iteration: Iteration) -> None:
        """Adds what all pipelines measured; starts planning when there is enough of it."""
        timeline = iteration.gather().timeline
        own = fit(timeline, latency(timeline)), timeline.makespan
        everywhere: list[tuple[Costs, float]] = [own] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        self._found += [costs for costs, _ in everywhere]
        self._spans.append(max(span for _, span in everywhere))
        if len(self._spans) == self.profile_iters and self.planned is None:
            self._start(iteration.schedule)

    def _start(self, schedule: Schedule) -> None:
        """Starts the planner on the first rank."""
        self._before = median(self._spans)
        if dist.get_rank() == 0:
            placement = schedule.placement
            placement = placement.reversed() if _mirrored(schedule) else placement
            limit = float(schedule.num_ranks) if self.memory_limit is None else self.memory_limit
            request = worker.request(
                placement,
                middle(self._found),
                schedule.num_microbatches,
                limit,
                self.seconds,
                self.objective,
            )
            self._answer = tempfile.TemporaryFile('w+')  # noqa: SIM115
            self._process = subprocess.Popen(
                worker.COMMAND, stdin=subprocess.PIPE, stdout=self._answer, text=True
            )
            self._process.stdin.write(request)
            self._process.stdin.close()

    def _ask(self, schedule: Schedule) -> Schedule | None:
        """What the first rank's planner says: nothing yet, keep, or a schedule."""
        said = [self._poll(schedule) if dist.get_rank() == 0 else _WAITING]
        dist.broadcast_object_list(said, src=0)
        if said[0] == _WAITING:
            return None
        if said[0] == _KEEP:
            self._settled = True
            return None
        self.planned = Schedule.from_json(said[0])
        self._seen, self._spans = 0, []  # measured anew
        return self.planned

    def _poll(self, schedule: Schedule) -> str:
        if self._process.poll() is None:
            return _WAITING
        if self._process.returncode:
            self.say(f'auto: planning failed, see above; {schedule.name} stays')
            return _KEEP
        self._answer.seek(0)
        text = self._answer.read()
        self._answer.close()
        planned, costs = Schedule.from_json(text), middle(self._found)
        planned = planned.reversed() if _mirrored(schedule) else planned
        expected, known = (self._simulated(each, costs) for each in (planned, schedule))
        times = f'{known * 1e3:.1f} ms with {schedule.name}, {expected * 1e3:.1f} ms planned'
        if expected >= known:
            self.say(f'auto: nothing better found (simulated: {times}); {schedule.name} stays')
            return _KEEP
        self.say(f'auto: switches to a planned schedule (simulated: {times})')
        return planned.to_json()

    def _simulated(self, schedule: Schedule, costs: Costs) -> float:
        timeline = simulate(schedule, costs)
        return max(timeline.windows) if self.objective == 'window' else timeline.makespan

    def _compare(self) -> None:
        """Tells what the switch has brought."""
        if dist.get_rank() == 0:
            now = median(self._spans)
            self.say(
                f'auto: measured {self._before * 1e3:.1f} ms before, {now * 1e3:.1f} ms with the '
                f'planned schedule ({1 - now / self._before:+.1%} gained)'
            )
        self._settled = True


def _mirrored(schedule: Schedule) -> bool:
    """Whether its ranks are those of the paper in reverse: see `mcore.layout`."""
    return schedule.placement.ranks[0] != 0
