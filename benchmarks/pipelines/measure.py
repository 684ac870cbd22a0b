"""Runs all runners side by side: rounds in which each has its turn, so that drift hits all alike.

`measure` starts one process a rank and yields what they measure; `_rank` is what they do.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common.realtime import realtime
from benchmarks.common.spawning import joined, spawned
from benchmarks.pipelines.emulated import LAYERS, Meter, Times, sleep_until
from benchmarks.pipelines.entries import AUTO, MEGATRON, TORCH, Entry, is_asynchronous, plain

_LEAD = 0.01  # seconds between agreeing on a start and starting


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        entries: the runners.
        num_ranks, num_microbatches: p and m.
        times: of a full rank.
        rounds: samples of each runner, after one that does not count.
        iterations: that make one sample: its time is that of one, from the end of the second to the
            end of the last (ranks start together, and fall into step in the first two); of a
            single one, from its start.
        optimizer: whether each iteration ends with a step of Megatron's optimizer.
        realtime: whether ranks come before other programs while they are measured.
    """

    entries: tuple[Entry, ...]
    num_ranks: int
    num_microbatches: int
    times: Times
    rounds: int
    iterations: int
    optimizer: bool
    realtime: bool = False


@dataclass(frozen=True)
class Sample:
    """One turn of one runner.

    Attributes:
        seconds: of one iteration: see `Job.iterations`; of the slowest rank.
        overhead: CPU seconds of an iteration that the slowest rank's thread spent beside the
            emulated passes: the runtime's own cost.
        core_wait: seconds of an iteration that the rank's thread which waited longest was ready to
            run and had no core; None where the system does not tell.
        live: most activations that a rank held, of one microbatch on a full rank.
        checksum: squares of all gradients, summed over the ranks.
    """

    seconds: float
    overhead: float
    core_wait: float | None
    live: float
    checksum: float


class Runner(Protocol):
    """One schedule of one library on the emulated model, on one rank."""

    meter: Meter

    def gradients(self) -> Iterator[Any]:
        """Those of this rank's parameters, of the latest iteration."""

    def ready(self) -> Any:
        """Return a context around iterations; what it does is not timed."""

    def iterate(self) -> None:
        """One iteration."""


def measure(job: Job) -> Iterator[tuple[int, Sample | None]]:
    """(index of the entry, its sample) as they are measured; None for those that do not count.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    return spawned(_rank, job.num_ranks, job)


def _rank(rank: int, job: Job, port: int, queue: Any) -> None:
    """All runners on one rank; rank 0 reports."""
    with joined(rank, job.num_ranks, port, pipeline_model_parallel_size=job.num_ranks):
        runners = [_runner(entry, job) for entry in job.entries]
        gc.freeze()  # what is there stays there: collections need not look at it
        for number in range(job.rounds + 1):
            for index, runner in enumerate(runners):
                try:
                    sample = _sample(runner, job, job.entries[index])
                except Exception as error:
                    raise RuntimeError(
                        f'{job.entries[index].title} failed on rank {rank}'
                    ) from error
                if rank == 0:
                    queue.put((index, sample if number else None))


def _runner(entry: Entry, job: Job) -> Runner:
    """Return what runs `entry`."""
    if entry.runner == TORCH:
        from benchmarks.pipelines.torch_runner import TorchRunner

        return TorchRunner(entry.name, job.num_microbatches, job.times)
    from benchmarks.pipelines.runners import (
        EmulatedModel,
        MegatronRunner,
        TwoWayRunner,
        ZbppRunner,
    )

    model = EmulatedModel(job.times)
    if entry.runner == MEGATRON:
        return MegatronRunner(entry.schedule, model, job.optimizer)
    name = plain(entry.name)
    source = entry.schedule if name == AUTO else name
    if len(entry.schedule.placement.routes) > 1:
        return TwoWayRunner(entry.schedule, source, model)
    return ZbppRunner(entry.schedule, source, model, job.optimizer, entry.early, entry.waits)


def _sample(runner: Runner, job: Job, entry: Entry) -> Sample:
    """One turn; the same on all ranks."""
    import torch.distributed as dist

    gc.collect()
    meter = runner.meter
    if not is_asynchronous(entry.runner, entry.name):  # these have some in flight
        meter.live = 0
    meter.peak, meter.awake = meter.live, 0.0
    with runner.ready(), realtime(job.realtime):
        start = _agreed_start()
        sleep_until(start)
        used, waited = time.thread_time(), _core_wait()
        ends = [start]
        for _ in range(job.iterations):
            runner.iterate()
            ends.append(time.perf_counter())
        used = time.thread_time() - used
        waited = None if waited is None else _core_wait() - waited
    settled = min(2, job.iterations - 1)
    seconds = (ends[-1] - ends[settled]) / (job.iterations - settled)
    own = (seconds, used - meter.awake, waited, meter.peak / LAYERS, _squares(runner))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    times, overheads, waits, peaks, squares = zip(*gathered, strict=True)
    return Sample(
        max(times),
        max(overheads) / job.iterations,
        None if None in waits else max(waits) / job.iterations,
        max(peaks),
        math.fsum(itertools.chain(*squares)),  # whichever rank has which layer
    )


def _core_wait() -> float | None:
    """Return seconds that this thread has waited for a core so far, as Linux counts them."""
    try:
        _running, waiting, _turns = Path('/proc/thread-self/schedstat').read_text().split()
    except FileNotFoundError:
        return None
    return int(waiting) / 1e9


def _agreed_start() -> float:
    """Return a moment soon, in seconds of `time.perf_counter`, which is one clock on a host."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = torch.tensor(time.perf_counter() + _LEAD, dtype=torch.float64)
    dist.broadcast(start, 0)
    return start.item()


def _squares(runner: Runner) -> list[float]:
    """Of this rank's gradients of the latest iteration, summed for each layer."""
    return [g.double().square().sum().item() for g in runner.gradients()]


def checksums_agree(samples: Sequence[Sample]) -> bool:
    """Whether all did the same work; sums of floats may differ in their last digits."""
    found = [sample.checksum for sample in samples]
    return min(found) > 0 and max(found) / min(found) - 1 < 1e-5
