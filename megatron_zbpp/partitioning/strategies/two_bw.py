"""The planner of PipeDream-2BW (ICML'21, 2006.09503): equal stages, width, depth, microbatch.

For models of repeated blocks: every width w and depth d with w x d = N, microbatch sizes that are
powers of two, with and without recompute; the fastest that fits. A stage takes as long as the
slowest device that holds it, and its links; replicas exchange gradients once in m microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import Layers

_VERSIONS = 2  # of the weights: what the name says


@dataclass(frozen=True)
class Choice:
    """The configuration that is chosen."""

    width: int  # replicas of the pipeline (data parallel)
    depth: int  # stages of it
    microbatch: int  # samples of a microbatch
    num_microbatches: int  # of a batch on each replica
    recompute: bool  # whether activations are made again for the backward
    throughput: float  # samples a unit of time
    memory: float  # of the fullest device


def choices(
    layers: Layers, devices: Devices, batch: int, sizes: tuple[int, ...] = (1, 2, 4, 8)
) -> Iterator[Choice]:
    """Yield what may be run, whether it fits or not.

    Args:
        layers: costs of a microbatch of one sample; all times and memory grow with its size.
        devices: pipelines are runs of neighbours, as deep as that.
        batch: samples of a batch.
        sizes: of a microbatch, to try.
    """
    count = len(devices)
    for depth in (d for d in range(1, count + 1) if count % d == 0 and d <= len(layers)):
        width = count // depth
        for size in sizes:
            m, left = divmod(batch, width * size)
            if left or m < depth:
                continue
            for recompute in (False, True):
                time = _slowest(layers, devices, depth, size, recompute)
                exchange = _exchange(layers, devices, depth) / m
                memory = _memory(layers, depth, size, recompute)
                yield Choice(
                    width, depth, size, m, recompute, width * size / max(time, exchange), memory
                )


def two_bw(layers: Layers, devices: Devices, batch: int) -> Choice:
    """Return the fastest choice that fits every device."""
    room = min(device.memory for device in devices.devices)
    fitting = [choice for choice in choices(layers, devices, batch) if choice.memory <= room]
    if not fitting:
        raise ValueError(
            f'2bw: no width, depth and microbatch of a batch of {batch} fits a memory of {room:g}: '
            'give a batch that divides, more memory, or more devices'
        )
    return max(fitting, key=lambda choice: choice.throughput)


def _slowest(layers: Layers, devices: Devices, depth: int, size: int, recompute: bool) -> float:
    """Return the time between microbatches: of the slowest stage on any replica, with its links."""
    kinds = [
        sum(getattr(layer, name) for layer in layers) for name in ('forward', 'backward', 'weight')
    ]
    kinds[0] *= 1 + recompute
    output = size * max(layer.output for layer in layers)
    slowest = 0.0
    for at, device in enumerate(devices.devices):
        own = sum(f * time for f, time in zip(device.factors, kinds, strict=True)) / depth * size
        before = devices.edge(at - 1, at, output) if at % depth else 0.0
        behind = devices.edge(at, at + 1, output) if at % depth < depth - 1 else 0.0
        slowest = max(slowest, own + before + behind)
    return slowest


def _exchange(layers: Layers, devices: Devices, depth: int) -> float:
    """Return the time in which replicas of a stage exchange gradients, on the slowest of links."""
    width = len(devices) // depth
    if width == 1:
        return 0.0
    own = sum(layer.parameters for layer in layers) / depth
    links = (
        devices.edge(a, b, 2 * (width - 1) / width * own)
        for a in range(len(devices))
        for b in range(len(devices))
        if a != b and a % depth == b % depth
    )
    return max(links, default=0.0)


def _memory(layers: Layers, depth: int, size: int, recompute: bool) -> float:
    """Return memory of a device: two versions of its weights, and microbatches in flight."""
    weights = _VERSIONS * sum(layer.parameters for layer in layers) / depth
    held = size * sum(layer.activation for layer in layers) / depth
    if not recompute:
        return weights + depth * held
    inputs = size * max(layer.output for layer in layers)
    return weights + depth * inputs + held
