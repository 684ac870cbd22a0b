"""Strategies by name: each chooses a partition of a space, and estimates it in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import comb, inf
from typing import NamedTuple

from megatron_zbpp.ir import Placement
from megatron_zbpp.partitioning.bounds import Bounds
from megatron_zbpp.partitioning.space import Partition, Space
from megatron_zbpp.partitioning.strategies.dapple import (
    Model,
    Replicated,
    admitted,
    dapple,
    pipedream,
)
from megatron_zbpp.partitioning.strategies.pipe_torch import pipe_torch
from megatron_zbpp.partitioning.strategies.spp import min_cut_order
from megatron_zbpp.partitioning.strategies.two_bw import two_bw

_MOST_PLANS = 100_000  # of DAPPLE, which are all looked at


class Choice(NamedTuple):
    """The choice of a strategy."""

    partition: Partition  # one device a stage, which Megatron can run
    estimate: str  # what its own plan is and takes, in words


def choose(name: str, space: Space) -> Choice:
    """Return the partition that the strategy of that name chooses.

    Raises:
        ValueError: it is not known, or not for such devices or layers.
    """
    if name not in STRATEGIES:
        raise ValueError(f'strategy {name!r} is unknown: choose of {", ".join(STRATEGIES)}')
    return STRATEGIES[name](space)


def _pipedream(space: Space) -> Choice:
    bandwidth = _bandwidth('pipedream', space)
    times = [sum(each) for each in zip(*_times(space), strict=True)]
    outputs, parameters = _sizes(space)
    count = len(space.devices)
    value, stages = pipedream(times, outputs, parameters, count, bandwidth)
    _, straight = pipedream(times, outputs, parameters, count, bandwidth, straight=True)
    said = f'{value:g} between microbatches, {admitted(stages)} admitted'
    return Choice(_straight(space, straight), _words('pipedream', said, stages))


def _dapple(space: Space) -> Choice:
    bandwidth, count = _bandwidth('dapple', space), len(space.devices)
    plans = comb(len(space.layers) + count - 2, count - 1)  # cuts by shares of the devices
    if plans > _MOST_PLANS:
        raise ValueError(
            f'dapple tries every plan, and of {len(space.layers)} layers on {count} devices there '
            f'are {plans}, more than {_MOST_PLANS}: take another strategy, or leave --strategy out'
        )
    forward, backward, weight = _times(space)
    model = Model(forward, [b + w for b, w in zip(backward, weight, strict=True)], *_sizes(space))
    value, stages = dapple(model, count, space.num_microbatches, bandwidth)
    _, straight = dapple(model, count, space.num_microbatches, bandwidth, straight=True)
    return Choice(_straight(space, straight), _words('dapple', f'{value:g} a batch', stages))


def _pipe_torch(space: Space) -> Choice:
    value, cuts, order = pipe_torch(space.layers, space.devices)
    said = f'pipe-torch: {value:g} between microbatches, asynchronous'
    return Choice(Partition(_loop(space), cuts, order), said)


def _spp(space: Space) -> Choice:
    order = min_cut_order(space.devices, max(layer.output for layer in space.layers))
    cut = replace(space, devices=space.devices.ordered(order), keep_order=True)
    bound, cuts, _ = Bounds(cut).chain()
    said = (
        f'spp: devices in the order of a minimum cut, {", ".join(map(str, order))}; bound {bound:g}'
    )
    return Choice(Partition(_loop(space), tuple(cuts), order), said)


def _two_bw(space: Space) -> Choice:
    best = two_bw(space.layers, space.devices, space.num_microbatches)
    said = (
        f'2bw: {best.width} pipelines of {best.depth} stages, {best.num_microbatches} microbatches '
        f'of {best.microbatch} samples{", recompute" * best.recompute}: {best.throughput:g} '
        'samples a unit of time, an estimate for equal stages of repeated blocks'
    )
    return Choice(space.even(), said)


def _bandwidth(name: str, space: Space) -> float:
    if not space.alike or space.devices.latency:
        raise ValueError(
            f'{name} knows devices and links that are alike, and no latency: use pipe-torch or '
            'spp, or no --strategy'
        )
    rows = space.devices.bandwidth
    return (rows[0][1] if rows and len(rows) > 1 else 0.0) or inf


def _times(space: Space) -> tuple[list[float], list[float], list[float]]:
    """Return F, B and W of each layer, on devices that are alike."""
    forward, backward, weight = space.devices.devices[0].factors
    return (
        [forward * layer.forward for layer in space.layers],
        [backward * layer.backward for layer in space.layers],
        [weight * layer.weight for layer in space.layers],
    )


def _sizes(space: Space) -> tuple[list[float], list[float]]:
    """Return outputs and parameters of each layer."""
    return [x.output for x in space.layers], [x.parameters for x in space.layers]


def _loop(space: Space) -> Placement:
    return Placement.loop(len(space.devices))


def _given(space: Space) -> tuple[int, ...]:
    return tuple(range(len(space.devices)))


def _straight(space: Space, stages: Sequence[Replicated]) -> Partition:
    cuts = tuple(stage.end - stage.start for stage in stages)
    return Partition(_loop(space), cuts, _given(space))


def _words(name: str, value: str, stages: Sequence[Replicated]) -> str:
    """Return a plan in words; uneven replicas are no plan for Megatron."""
    runs = ', '.join(f'layers {s.start}-{s.end - 1} x{s.replicas}' for s in stages)
    text = f'{name}: {value}, with {runs}'
    if any(stage.replicas > 1 for stage in stages):
        text += ": an estimate, as Megatron's grid has as many replicas of every stage"
    return text


STRATEGIES: dict[str, Callable[[Space], Choice]] = {
    'pipedream': _pipedream,
    'dapple': _dapple,
    'pipe-torch': _pipe_torch,
    'spp': _spp,
    '2bw': _two_bw,
}
ORDERING = frozenset({'pipe-torch', 'spp'})  # those that choose the order of the devices
