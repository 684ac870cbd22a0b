"""All entries in turn on emulated passes, one process a rank; on two hosts where that is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.realtime import realtime
from benchmarks.common.spawning import joined, spawned
from benchmarks.partition.cases import MEGATRON, Entry
from benchmarks.partition.two_hosts import Network
from megatron_zbpp.partitioning.layers import Layers


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        entries: that take turns.
        layers: of the model, in seconds.
        factors: of each rank.
        num_microbatches: m.
        rows: of a message.
        rounds: of each, after one that does not count.
        realtime: whether ranks come before other programs.
        network: of two hosts; None: all ranks on this one.
        busy: whether slower ranks keep a processor busy in their passes.
    """

    entries: tuple[Entry, ...]
    layers: Layers
    factors: tuple[float, ...]
    num_microbatches: int
    rows: int
    rounds: int
    realtime: bool = False
    network: Network | None = None
    busy: bool = False


@dataclass(frozen=True)
class Sample:
    """One iteration of one entry.

    Attributes:
        seconds: of the slowest rank.
        gradients: the sum of squares of each layer's, in hex: equal where the work was.
    """

    seconds: float
    gradients: tuple[str, ...]


def measure(job: Job) -> Iterator[tuple[int, Sample | None]]:
    """(index of the entry, its sample) as they are measured; None for those that do not count.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    return spawned(_rank, len(job.factors), job)


def _rank(rank: int, job: Job, port: int, queue: Any) -> None:
    meeting: int | str = port
    if job.network is not None:
        meeting = job.network.enter(2 * rank // len(job.factors))
    sizes = {'pipeline_model_parallel_size': len(job.factors)}
    with joined(rank, len(job.factors), meeting, **sizes):
        runners = [_runner(entry, job, job.factors[rank]) for entry in job.entries]
        for number in range(job.rounds + 1):
            for index, runner in enumerate(runners):
                sample = _sample(runner, job)
                if rank == 0:
                    queue.put((index, sample if number else None))


def _runner(entry: Entry, job: Job, factor: float) -> Any:
    from benchmarks.partition.model import UnevenModel
    from benchmarks.pipelines.runners import MegatronRunner, ZbppRunner

    busy = job.busy and factor != 1
    model = UnevenModel(job.layers, entry.cuts, factor, job.rows, busy)
    if entry.runner == MEGATRON:
        return MegatronRunner(entry.schedule, model, optimizer=False)
    return ZbppRunner(entry.schedule, entry.schedule, model, optimizer=False)


def _sample(runner: Any, job: Job) -> Sample:
    """One iteration; the same on all ranks."""
    import torch.distributed as dist

    with runner.ready(), realtime(job.realtime):
        dist.barrier()
        start = time.perf_counter()
        runner.iterate()
        seconds = time.perf_counter() - start
    squares = {
        f'{layer.index}': p.grad.double().square().sum().item().hex()
        for layer, p in _layers(runner)
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (seconds, squares))
    times, found = zip(*gathered, strict=True)
    every = {index: value for own in found for index, value in own.items()}
    return Sample(max(times), tuple(every[index] for index in sorted(every, key=int)))


def _layers(runner: Any) -> Iterator[tuple[Any, Any]]:
    for chunk in runner._models:
        for layer in chunk.layers:
            yield layer, layer.weight


def alike(samples: Sequence[Sequence[Sample]]) -> bool:
    """Whether all did the same work, to the bit."""
    return len({sample.gradients for own in samples for sample in own}) == 1
