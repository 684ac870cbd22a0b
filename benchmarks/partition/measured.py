"""What the stages of a real GPT take on this CPU, evenly split: by least squares and by shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common.spawning import joined, spawned
from megatron_zbpp.analysis.fit_costs import fit, middle
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.layout import layers_per_stage, layout_string
from megatron_zbpp.schedules import build

HEAD = 64  # size of an attention head
_WARM_UP = 1  # iterations


@dataclass(frozen=True)
class Gpt:
    """A GPT, and how often it is measured.

    Attributes:
        num_ranks: p.
        layers, hidden, sequence, words: of the model; a microbatch is one sample.
        iterations: of one microbatch each: so ranks compute one after the other.
    """

    num_ranks: int
    layers: int
    hidden: int
    sequence: int
    words: int
    iterations: int


def stages(gpt: Gpt) -> tuple[str, Costs]:
    """Return the even layout of the layers, and the times of its stages in seconds: medians.

    Raises:
        RuntimeError: a rank failed.
    """
    found: list[Costs] = list(spawned(_rank, gpt.num_ranks, gpt))
    placement = build('zb-h1', gpt.num_ranks, 1).placement
    return layout_string(layers_per_stage(gpt.layers, placement)), middle(found)


def _rank(rank: int, gpt: Gpt, port: int, queue: Any) -> None:
    for costs in _costs(rank, gpt, port):
        if rank == 0:
            queue.put(costs)


def _costs(rank: int, gpt: Gpt, port: int) -> Iterator[Costs]:
    with joined(rank, gpt.num_ranks, port, pipeline_model_parallel_size=gpt.num_ranks):
        from benchmarks.pipelines.runners import ZbppRunner
        from benchmarks.training.model import Gpt as Model

        model = Model(gpt.layers, gpt.hidden, HEAD, gpt.sequence, gpt.words)
        runner = ZbppRunner(build('zb-h1', gpt.num_ranks, 1), 'zb-h1', model, optimizer=False)
        with runner.ready():
            for number in range(_WARM_UP + gpt.iterations):
                runner.iterate()
                latest = runner.plugin.latest
                assert latest is not None
                timeline = latest.gather().timeline
                if number >= _WARM_UP:
                    yield fit(timeline)
