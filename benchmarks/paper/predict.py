"""What the simulator says of the papers' settings: samples per GPU and second, and GB."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from benchmarks.paper.published import SEQUENCE, Model, VShape
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.schedules import build

# fp16 parameter, fp32 gradient, fp32 parameter, Adam's two moments
BYTES_PER_PARAMETER = 2 + 4 + 4 + 4 + 4


class Prediction(NamedTuple):
    """Of one setting and schedule.

    Attributes:
        throughput: samples per GPU and second, each rank stepping when it is done.
        synchronous: the same where every step waits for all ranks.
        memory: GB of the fullest rank: activations, and 18 bytes for each parameter of a layer.
        bubble_rate: idle share of the longest window: Table 5's.
    """

    throughput: float
    synchronous: float
    memory: float
    bubble_rate: float


def predict(
    schedule: str, model: Model, microbatches: int, times: tuple[float, ...], factor: int = 1
) -> Prediction:
    """Return what `schedule` reaches with `model`.

    Args:
        schedule: a name of the registry.
        model: a row of Table 3.
        microbatches: m.
        times: T_F, T_B, T_W, T_comm of Table 6, in ms.
        factor: a microbatch has so many times the samples of Table 3. Each pass and message takes
            so many times as long, so the schedule and its throughput stay; activations grow.
    """
    timeline, activations, states = _iteration(schedule, model, microbatches, times)
    samples = 1000 * microbatches * model.batch / model.num_ranks
    held = (factor * most + own for most, own in zip(activations, states, strict=True))
    return Prediction(
        samples / max(timeline.windows),
        samples / timeline.makespan,
        max(held) / 1e9,
        timeline.bubble_window,
    )


@cache
def _iteration(
    schedule: str, model: Model, microbatches: int, times: tuple[float, ...]
) -> tuple[Timeline, tuple[float, ...], tuple[float, ...]]:
    """Return the simulated iteration, and bytes of each rank: of activations, of its layers."""
    chunks = model.layers if schedule == 'interleaved' else 1
    costs = _costs(model, times, chunks)
    built = build(schedule, model.num_ranks, microbatches, num_chunks=chunks, costs=costs)
    layers = (
        sum(_layers(model, stage, chunks) for stage in built.placement.stages(rank))
        for rank in range(model.num_ranks)
    )
    of_layer = BYTES_PER_PARAMETER * 12 * model.hidden**2
    states = tuple(of_layer * count for count in layers)
    return simulate(built, costs), tuple(peak(built, costs)), states


def activation_bytes(heads: int, hidden: int, samples: int) -> tuple[int, int]:
    """Return M_B and M_W of one layer (Table 1): held from F to B, and from B to W."""
    return (
        SEQUENCE * samples * (34 * hidden + 5 * heads * SEQUENCE),
        32 * SEQUENCE * samples * hidden,
    )


def v_shape_timeline(schedule: str, setting: VShape, factor: int = 1) -> Timeline:
    """Return the simulated iteration of a setting of arXiv Tables 6 and 8.

    Args:
        schedule: a name of the registry.
        setting: of the tables; a microbatch takes 1 of time on a full rank.
        factor: so many times as many microbatches, each so many times as short.
    """
    chunks = 2 if schedule == 'zb-v' else 1
    forward = (1 - setting.weight) / 2
    shares = (1 / chunks / factor,) * setting.num_ranks * chunks
    times = [tuple(t * s for s in shares) for t in (forward, forward, setting.weight)]
    activation, retained = activation_bytes(setting.heads, setting.hidden, 1)
    bytes_held = [tuple(x * s for s in shares) for x in (activation, retained)]
    costs = Costs.of(
        *times, setting.comm / factor, activation=bytes_held[0], retained=bytes_held[1]
    )
    built = build(schedule, setting.num_ranks, setting.num_microbatches * factor, costs=costs)
    return simulate(built, costs)


def _costs(model: Model, times: tuple[float, ...], chunks: int) -> Costs:
    """Return equal times of all stages, as Table 6 has one for all, and each one's bytes."""
    forward, backward, weight, comm = times
    stages = model.num_ranks * chunks
    layers = [_layers(model, stage, chunks) for stage in range(stages)]
    activation, retained = activation_bytes(model.heads, model.hidden, model.batch)
    return Costs.of(
        *((time / chunks,) * stages for time in (forward, backward, weight)),
        comm,
        activation=tuple(activation * layer for layer in layers),
        retained=tuple(retained * layer for layer in layers),
    )


def _layers(model: Model, stage: int, chunks: int) -> int:
    """Return layers of a stage: the first and the last have one fewer."""
    ends = (0, model.num_ranks * chunks - 1)
    return model.layers // chunks - (stage in ends)
