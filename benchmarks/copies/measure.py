"""Runs schedules whose activations move, and holds time and memory against the plan."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.common.realtime import realtime
from benchmarks.common.spawning import spawned
from benchmarks.copies.engine import SleepingCopies
from benchmarks.copies.stage import Sizes, SleepingStage
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed

CPU = torch.device('cpu')
SIZES = Sizes(0.02, 2**20)
MESSAGE = Message((4,), torch.float32, CPU)


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        name: of the schedule; with `+offload`, `+recompute`: of all chunks.
        ratio: k, time of a copy out and back over that of F, B and W.
        num_ranks, num_microbatches: p and m.
        sizes: of a stage.
        rounds: of which the first does not count.
        realtime: whether ranks come before other programs.
    """

    name: str
    ratio: float = 1.0
    num_ranks: int = 2
    num_microbatches: int = 8
    sizes: Sizes = SIZES
    rounds: int = 4
    realtime: bool = False

    def schedule(self) -> Schedule:
        """Return it, its copies planned for these times."""
        name, _, technique = self.name.partition('+')
        plain = build(name, self.num_ranks, self.num_microbatches)
        if technique == 'recompute':
            return recomputed(plain, 'all')
        return offloaded(plain, 'all', ratio=self.ratio) if technique else plain

    def costs(self, schedule: Schedule) -> Costs:
        """Return its times in seconds, and its activations in those of a stage."""
        times = (self.sizes.seconds,) * schedule.num_stages
        ones = (1.0,) * schedule.num_stages
        way = (self.ratio * 3 * self.sizes.seconds / 2,) * schedule.num_stages
        copies = dict.fromkeys(('O', 'L'), way)
        zeros = (0.0,) * len(ones)
        return Costs.of(times, times, times, activation=ones, retained=zeros, times=copies)


class Found(NamedTuple):
    """What came of a case.

    Attributes:
        seconds: of an iteration, the median.
        simulated: the same, simulated.
        held: bytes that each rank held at most, by its resident set.
        planned: the same, by the order.
    """

    seconds: float
    simulated: float
    held: tuple[float, ...]
    planned: tuple[float, ...]


def measured(case: Case) -> Found:
    """Run `case` on processes of this machine."""
    schedule = case.schedule()
    costs = case.costs(schedule)
    ranks: dict[int, list[tuple[float, int]]] = dict(spawned(_rank, case.num_ranks, case))
    rounds = zip(*(ranks[rank] for rank in sorted(ranks)), strict=True)
    took = [max(seconds for seconds, _ in found) for found in rounds]
    held = tuple(median(most for _, most in ranks[rank]) for rank in sorted(ranks))
    planned = tuple(amount * case.sizes.nbytes for amount in peak(schedule, costs))
    return Found(median(took), simulate(schedule, costs).makespan, held, planned)


def _rank(rank: int, case: Case, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore('127.0.0.1', port, is_master=False)
    dist.init_process_group('gloo', store=store, rank=rank, world_size=case.num_ranks)
    schedule = case.schedule()
    programs = lower(schedule)
    chain = [(a, b) for a, b in itertools.pairwise(schedule.placement.only_route) if a != b]
    channels = Channels(dist.group.WORLD, {*chain, *((b, a) for a, b in chain)}, CPU)
    way = case.ratio * 3 * case.sizes.seconds / 2
    activations = ActivationStore(CPU, copies=SleepingCopies(case.sizes.nbytes / way))
    partners = (
        {(r, schedule.placement.partner(r)) for r in range(case.num_ranks)}
        if any(p.kind == 'E' for _, p in schedule)
        else set()
    )
    if partners:
        pairs = {pair for pair in partners if pair[0] != pair[1]}
        activations.join(Channels(dist.group.WORLD, pairs, CPU, shapes=True, saved=True))
    found: list[tuple[float, int]] = []
    with realtime(case.realtime):
        for _ in range(case.rounds):
            found.append(_iteration(rank, case, schedule, programs[rank], channels, activations))
    results.put((rank, found[1:]))
    dist.barrier()
    dist.destroy_process_group()


def _iteration(
    rank: int,
    case: Case,
    schedule: Schedule,
    program: Any,
    channels: Channels,
    activations: ActivationStore,
) -> tuple[float, int]:
    """Return how long it took, and how many bytes more than before the process held at most."""
    store, last = WeightGradStore(), schedule.num_stages - 1
    stages = {
        stage: SleepingStage(store, case.sizes, 'last' if stage == last else '')
        for stage in schedule.placement.stages(rank)
    }
    activations.keep(p for stage in stages.values() for p in stage.parameters())
    before, most = anonymous_bytes(), 0

    @contextmanager
    def watched(p: Pass) -> Iterator[None]:
        nonlocal most
        yield
        most = max(most, anonymous_bytes() - before)

    executor = Executor(
        program, stages, channels, MESSAGE, store, HostClock(), watched, activations
    )
    dist.barrier()
    start = time.perf_counter()
    executor.run()
    return time.perf_counter() - start, most


def anonymous_bytes() -> int:
    """Return the resident set of this process, but for files and shared memory."""
    for line in Path('/proc/self/status').read_text().splitlines():
        name, _, value = line.partition(':')
        if name == 'RssAnon':
            return int(value.split()[0]) * 1024
    raise OSError('no RssAnon in /proc/self/status: measure on Linux')
