"""PipeDream (SOSP'19, 1806.03377): stages with replicas, so that the slowest stage or link is fast.

For asynchronous training, one level of the machine at a time. A stage of layers i..j on r replicas
takes max(sum of times, 2 (r - 1) x parameters / bandwidth) / r; a link between stages takes
2 x output / bandwidth. A table over (layers, devices left) finds the least maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple


class Replicated(NamedTuple):
    """A stage on several devices.

    Attributes:
        start: its first layer.
        end: the layer behind its last.
        replicas: devices that take turns with microbatches.
    """

    start: int
    end: int
    replicas: int


def pipedream(
    times: Sequence[float],
    outputs: Sequence[float],
    parameters: Sequence[float],
    num_devices: int,
    bandwidth: float = inf,
    straight: bool = False,
) -> tuple[float, tuple[Replicated, ...]]:
    """Return the time of the slowest stage or link, and the stages.

    >>> pipedream([2, 2, 8, 2, 2], [0] * 5, [0] * 5, 4)[0]
    4.0

    Args:
        times: of F, B and W of each layer together.
        outputs: bytes that each layer sends on.
        parameters: bytes of each layer, which replicas exchange.
        num_devices: N, all of them used.
        bandwidth: between all devices, in bytes a unit of time.
        straight: whether each stage has one device.
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
    """Return how many microbatches are admitted at the start (NOAM)."""
    return ceil(sum(stage.replicas for stage in stages) / stages[0].replicas)
