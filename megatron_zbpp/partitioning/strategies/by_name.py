"""What a strategy chooses for a space: a straight partition, and beside it an estimate in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from megatron_zbpp.ir import Placement
from megatron_zbpp.partitioning.bounds import Bounds
from megatron_zbpp.partitioning.space import Space
from megatron_zbpp.partitioning.stages import Partition
from megatron_zbpp.partitioning.strategies.dapple import dapple
from megatron_zbpp.partitioning.strategies.pipe_torch import pipe_torch
from megatron_zbpp.partitioning.strategies.pipedream import Replicated, admitted, pipedream
from megatron_zbpp.partitioning.strategies.spp import min_cut_order
from megatron_zbpp.partitioning.strategies.two_bw import two_bw

_MOST_LAYERS = 14  # of which DAPPLE's plans are all tried


class Choice(NamedTuple):
    """What a strategy chooses.

    Attributes:
        partition: one device a stage, which Megatron can run.
        estimate: what its own plan is and takes, in words.
    """

    partition: Partition
    estimate: str


def choose(name: str, space: Space) -> Choice:
    """Return what the strategy of that name chooses.

    Raises:
        ValueError: it is not known, or not for such devices or layers.
    """
    if name not in STRATEGIES:
        raise ValueError(f'strategy {name!r} is unknown: choose of {", ".join(STRATEGIES)}')
    return STRATEGIES[name](space)


def _pipedream(space: Space) -> Choice:
    times, outputs, parameters, bandwidth = _alike('pipedream', space)
    count = len(space.devices)
    value, stages = pipedream(times, outputs, parameters, count, bandwidth)
    _, straight = pipedream(times, outputs, parameters, count, bandwidth, straight=True)
    said = f'{value:g} between microbatches, {admitted(stages)} admitted'
    return Choice(_straight(space, straight), _words('pipedream', said, stages))


def _dapple(space: Space) -> Choice:
    times, _, parameters, bandwidth = _alike('dapple', space)
    if len(times) > _MOST_LAYERS:
        raise ValueError(f'dapple tries every plan: {len(times)} layers are too many; group them')
    forward = [time / 3 for time in times]  # its B takes twice F's time
    value, stages = dapple(
        forward, parameters, len(space.devices), space.num_microbatches, bandwidth
    )
    bounds = Bounds(space)
    partition = Partition(_loop(space), tuple(bounds.chain()[1]), _given(space))
    return Choice(partition, _words('dapple', f'{value:g} a batch', stages))


def _pipe_torch(space: Space) -> Choice:
    value, cuts, order = pipe_torch(space.layers, space.devices)
    said = f'pipe-torch: {value:g} between microbatches, asynchronous'
    return Choice(Partition(_loop(space), cuts, order), said)


def _spp(space: Space) -> Choice:
    order = min_cut_order(space.devices, max(layer.output for layer in space.layers))
    bound, cuts, _ = Bounds(space).chain()
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


def _alike(name: str, space: Space) -> tuple[list[float], list[float], list[float], float]:
    """Return times by the factor of all devices, outputs, parameters, and the links' bandwidth.

    Raises:
        ValueError: devices or links differ, which the strategy does not know.
    """
    if not space.alike or space.devices.latency:
        raise ValueError(
            f'{name} knows devices and links that are alike, and no latency: use pipe-torch or '
            'spp, or no --strategy'
        )
    factors = space.devices.devices[0].factors
    times = [
        sum(f * t for f, t in zip(factors, (x.forward, x.backward, x.weight), strict=True))
        for x in space.layers
    ]
    rows = space.devices.bandwidth
    bandwidth = (rows[0][1] if rows and len(rows) > 1 else 0.0) or inf
    outputs = [x.output for x in space.layers]
    return times, outputs, [x.parameters for x in space.layers], bandwidth


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
