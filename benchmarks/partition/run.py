"""All entries in turn, one process a rank: on emulated passes, or on those of a real GPT."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.realtime import realtime
from benchmarks.common.spawning import joined, spawned
from benchmarks.partition.cases import MEGATRON, Entry
from benchmarks.partition.measured import Gpt, costs_of
from benchmarks.partition.place import Place
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.layers import Layers

_RATE = 0.1  # of learning


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
        place: where ranks run.
        realtime: whether they come before other programs.
        busy: whether slower ranks keep a processor busy in their passes.
        gpt: that is trained, whose passes take what they take; None: passes are emulated.
    """

    entries: tuple[Entry, ...]
    layers: Layers
    factors: tuple[float, ...]
    num_microbatches: int
    rows: int
    rounds: int
    place: Place
    realtime: bool = False
    busy: bool = False
    gpt: Gpt | None = None


@dataclass(frozen=True)
class Sample:
    """One iteration of one entry.

    Attributes:
        seconds: of the slowest rank, without the optimizer's step.
        work: what came out, in hex, equal where the work was: the losses of a GPT's microbatches,
            or the sum of squares of each emulated layer's gradients.
        costs: what its passes and messages took, in seconds; None: Megatron does not tell.
    """

    seconds: float
    work: tuple[str, ...]
    costs: Costs | None


def measure(job: Job) -> Iterator[tuple[int, Sample | None]]:
    """(index of the entry, its sample) as they are measured; None for those that do not count.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    return spawned(_rank, len(job.factors), job)


def _rank(rank: int, job: Job, port: int, queue: Any) -> None:
    meeting = job.place.enter(rank, len(job.factors), port)
    sizes = {'pipeline_model_parallel_size': len(job.factors)}
    with joined(rank, len(job.factors), meeting, **sizes):
        runners = [runner_of(entry, job, job.factors[rank]) for entry in job.entries]
        for number in range(job.rounds + 1):
            if number == 1:  # what carries messages has begun, and has no share
                job.place.limit(rank)
            for index, runner in enumerate(runners):
                sample = _sample(runner, job, job.entries[index])
                if rank == 0:
                    queue.put((index, sample if number else None))


def runner_of(entry: Entry, job: Job, factor: float) -> Any:
    """Return what runs iterations of an entry on this rank, whose passes take `factor` as long."""
    from benchmarks.partition.model import LaidOutGpt, ShardedModel, UnevenModel
    from benchmarks.pipelines.runners import MegatronRunner, ZbppRunner

    if job.gpt is None:
        busy = job.busy and factor != 1
        given = job.layers, entry.cuts, factor, job.rows, busy
        model = UnevenModel(*given) if entry.shard is None else ShardedModel(entry.shard, *given)
    else:
        model = LaidOutGpt(job.gpt, entry.layout)
    if entry.runner == MEGATRON:
        return MegatronRunner(entry.schedule, model, optimizer=False)
    return ZbppRunner(entry.schedule, entry.schedule, model, optimizer=False)


def _sample(runner: Any, job: Job, entry: Entry) -> Sample:
    """One iteration; the same on all ranks."""
    import torch.distributed as dist

    with runner.ready(), realtime(job.realtime):
        dist.barrier()
        start = time.perf_counter()
        runner.iterate()
        seconds = time.perf_counter() - start
        costs = None if entry.runner == MEGATRON else costs_of(runner)
    own = _squares(runner) if job.gpt is None else _trained(runner, job.gpt.tied)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (seconds, own))
    times, found = zip(*gathered, strict=True)
    every = {index: value for own in found for index, value in own.items()}
    return Sample(max(times), tuple(every[index] for index in sorted(every)), costs)


def _squares(runner: Any) -> dict[int, str]:
    """Return the sum of squares of the gradients of this rank's layers, in hex."""
    return {
        layer.index: p.grad.double().square().sum().item().hex() for layer, p in _layers(runner)
    }


def _trained(runner: Any, tied: bool) -> dict[int, str]:
    """Step by plain gradient descent; return the losses, where they are known, in hex."""
    for parameter in runner.parameters:
        if not tied:  # without an optimizer nobody sums the gradients of both copies
            parameter.data.add_(parameter.grad, alpha=-_RATE)
        parameter.grad = None  # those of all entries would take much memory
    losses = [loss for each in runner.reported for loss in each.values()]
    return {index: loss.item().hex() for index, loss in enumerate(losses)}


def _layers(runner: Any) -> Iterator[tuple[Any, Any]]:
    for chunk in runner._models:
        for layer in chunk.layers:
            yield layer, layer.weight


def alike(samples: Sequence[Sequence[Sample]]) -> bool:
    """Whether all did the same work in each round, to the bit."""
    rounds = zip(*samples, strict=True)
    return all(len({sample.work for sample in taken}) == 1 for taken in rounds)
