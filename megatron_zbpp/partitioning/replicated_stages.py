"""PipeDream and DAPPLE: stages with replicas, by tables over layers and devices.

PipeDream (SOSP'19, 1806.03377) makes the slowest stage or link fast, for asynchronous training, one
level of the machine at a time. A stage of layers i..j on r replicas takes max(sum of times, 2 (r -
1) x parameters / bandwidth) / r; a link between stages takes 2 x output / bandwidth. A table over
(layers, devices left) finds the least maximum.

DAPPLE (PPoPP'21, 2007.01045) plans synchronous stages, in the time of a batch. The paper's closed
form around a pivot stage may be off by a third from the time of 1F1B; so plans are ranked by
simulating 1F1B, each link a stage of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import ceil, inf
from typing import NamedTuple

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build


class Replicated(NamedTuple):
    """A stage on several devices."""

    start: int  # its first layer
    end: int  # the layer behind its last
    replicas: int  # devices that take turns with microbatches


def pipedream(
    times: Sequence[float],
    outputs: Sequence[float],
    parameters: Sequence[float],
    num_devices: int,
    bandwidth: float = inf,
    straight: bool = False,
) -> tuple[float, tuple[Replicated, ...]]:
    """Return the time of the slowest stage or link, and the stages.

    `times` are of F, B and W of each layer together; `outputs`, `parameters` and `bandwidth` are in
    one unit. With `straight` each stage has one device.

    >>> pipedream([2, 2, 8, 2, 2], [0] * 5, [0] * 5, 4)[0]
    4.0
    """

    @lru_cache(None)
    def alone(start: int, end: int, replicas: int) -> float:
        exchange = 2 * (replicas - 1) * sum(parameters[start:end]) / bandwidth
        return max(float(sum(times[start:end])), exchange) / replicas

    @lru_cache(None)
    def best(end: int, devices: int) -> tuple[float, tuple[Replicated, ...]]:
        found: tuple[float, tuple[Replicated, ...]] = inf, ()
        if not straight or devices == 1:
            found = alone(0, end, devices), (Replicated(0, end, devices),)
        for cut in range(1, end):
            for own in range(1, 2 if straight else devices):
                if own == devices:
                    break
                before, stages = best(cut, devices - own)
                value = max(before, 2 * outputs[cut - 1] / bandwidth, alone(cut, end, own))
                if value < found[0]:
                    found = value, (*stages, Replicated(cut, end, own))
        return found

    return best(len(times), num_devices)


def admitted(stages: Sequence[Replicated]) -> int:
    """Return the number of microbatches that are admitted at the start (NOAM)."""
    return ceil(sum(stage.replicas for stage in stages) / stages[0].replicas)


class Stage(NamedTuple):
    """Times of a stage or a link: for one microbatch, and to exchange gradients once a batch."""

    forward: float
    backward: float
    exchange: float = 0.0


class Model(NamedTuple):
    """Costs of each layer, summed from the first on."""

    forward: Sequence[float]  # time of F
    backward: Sequence[float]  # time of B and W together
    outputs: Sequence[float]  # what it sends on
    parameters: Sequence[float]  # which replicas exchange, in the same unit


def latency_bound(stages: Sequence[Stage], num_microbatches: int) -> float:
    """Return a lower bound of fused schedules of these stages: max over Q of L_Q."""
    before, found = 0.0, 0.0
    for both in (stage.forward + stage.backward for stage in stages):
        found = max(found, before + num_microbatches * both)
        before += both
    return found


def simulated_latency(stages: Sequence[Stage], num_microbatches: int) -> float:
    """Return the time of 1F1B, each stage's gradients exchanged behind its last backward."""
    costs = Costs.of(
        tuple(s.forward for s in stages), tuple(s.backward for s in stages), (0.0,) * len(stages)
    )
    spans = simulate(build('1f1b', len(stages), num_microbatches), costs).spans
    return max(own[-1][1] + s.exchange for own, s in zip(spans, stages, strict=True))


def dapple(
    model: Model,
    num_devices: int,
    num_microbatches: int,
    bandwidth: float = 1.0,
    straight: bool = False,
) -> tuple[float, tuple[Replicated, ...]]:
    """Return the best hybrid plan's latency and stages, by simulation of every plan.

    r replicas exchange 2 (r - 1) / r of the parameters over `bandwidth`. With `straight` each stage
    has one device.

    >>> dapple(Model([1] * 4, [2] * 4, [0] * 4, [1, 1, 1, 30]), 4, 8)[0]
    30.0
    """
    best: tuple[float, tuple[Replicated, ...]] = inf, ()
    for plan in _plans(len(model.forward), num_devices):
        if straight and len(plan) < num_devices:
            continue
        stages = list(_stages(model, plan, bandwidth))
        if latency_bound(stages, num_microbatches) >= best[0]:
            continue
        value = simulated_latency(stages, num_microbatches)
        if value < best[0]:
            best = value, plan
    return best


def _stages(model: Model, plan: Sequence[Replicated], bandwidth: float) -> Iterator[Stage]:
    """Yield the stages of a plan; between two of them the link, where that takes time."""
    for own in plan:
        link = model.outputs[own.start - 1] / bandwidth if own.start else 0.0
        if link:
            yield Stage(link, link)
        held = slice(own.start, own.end)
        shared = 2 * (own.replicas - 1) / own.replicas * sum(model.parameters[held])
        yield Stage(
            sum(model.forward[held]) / own.replicas,
            sum(model.backward[held]) / own.replicas,
            shared / bandwidth,
        )


def _plans(num_layers: int, num_devices: int) -> Iterator[tuple[Replicated, ...]]:
    """Yield every way to cut layers and devices into as many runs."""
    for count in range(1, min(num_layers, num_devices) + 1):
        for cuts in combinations(range(1, num_layers), count - 1):
            for shares in combinations(range(1, num_devices), count - 1):
                marks, used = (0, *cuts, num_layers), (0, *shares, num_devices)
                yield tuple(
                    Replicated(marks[i], marks[i + 1], used[i + 1] - used[i]) for i in range(count)
                )
