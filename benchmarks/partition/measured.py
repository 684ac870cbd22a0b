"""What the stages of a real GPT take on this CPU, evenly split: measured while it trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common.spawning import joined, spawned
from benchmarks.partition.place import Place
from megatron_zbpp.analysis.fit_costs import measured_costs, middle
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.placement import layers_per_stage, layout_string
from megatron_zbpp.schedules import build

HEAD = 64  # size of an attention head


@dataclass(frozen=True)
class Gpt:
    """A GPT, and how often it is measured.

    Attributes:
        num_ranks: p.
        layers, hidden, sequence, words: of the model; a microbatch is one sample.
        iterations: that are measured, of each schedule.
        num_microbatches: of an iteration; 1: ranks compute one after the other.
        tied: whether the output layer is the embedding.
    """

    num_ranks: int
    layers: int
    hidden: int
    sequence: int
    words: int
    iterations: int
    num_microbatches: int = 1
    tied: bool = False


def stages(gpt: Gpt, schedules: tuple[str, ...], place: Place) -> tuple[str, dict[str, Costs]]:
    """Return the even layout of the layers, and the times of its stages in seconds: medians.

    Args:
        gpt: that is trained.
        schedules: on a loop of one stage a rank, which take turns; times are by their names.
        place: where ranks run.

    Raises:
        RuntimeError: a rank failed.
    """
    found: dict[str, list[Costs]] = defaultdict(list)
    for name, costs in spawned(_rank, gpt.num_ranks, (gpt, schedules, place)):
        found[name].append(costs)
    placement = build(schedules[0], gpt.num_ranks, 1).placement
    layout = layout_string(layers_per_stage(gpt.layers, placement))
    return layout, {name: middle(found[name]) for name in schedules}


def _rank(rank: int, job: tuple[Gpt, tuple[str, ...], Place], port: int, queue: Any) -> None:
    for name, costs in _costs(rank, port, *job):
        if rank == 0:
            queue.put((name, costs))


def _costs(
    rank: int, port: int, gpt: Gpt, schedules: tuple[str, ...], place: Place
) -> Iterator[tuple[str, Costs]]:
    p = gpt.num_ranks
    meeting = place.enter(rank, p, port)
    with joined(rank, p, meeting, pipeline_model_parallel_size=p):
        from benchmarks.pipelines.runners import ZbppRunner
        from benchmarks.training.model import Gpt as Model

        runners = {}
        for name in schedules:
            sizes = gpt.layers, gpt.hidden, HEAD, gpt.sequence, gpt.words
            model, schedule = Model(*sizes, tied=gpt.tied), build(name, p, gpt.num_microbatches)
            runners[name] = ZbppRunner(schedule, name, model, optimizer=False)
        for number in range(1 + gpt.iterations):
            if number == 1:  # what carries messages has begun, and has no share
                place.limit(rank)
            for name, runner in runners.items():
                with runner.ready():
                    runner.iterate()
                    costs = costs_of(runner)
                if number:
                    yield name, costs


def costs_of(runner: Any) -> Costs:
    """Return what its latest iteration took, in seconds; a collective, when it is ready."""
    latest = runner.plugin.latest
    assert latest is not None
    return measured_costs(latest.gather().timeline)
