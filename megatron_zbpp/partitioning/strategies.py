"""Partitions of others' planners, each by its name: the choice of its recurrence, and its time.

pipedream    stages with replicas that even out stages and links (asynchronous)
dapple       the same for synchronous schedules, ranked by a closed form
pipe-torch   straight, over orders of unequal devices and links (asynchronous)
spp          straight, devices in the order of a recursive minimum cut
2bw          equal stages: width, depth and microbatch at once (asynchronous)

PipeDream and DAPPLE are in `replicated_stages`. Of the others:

- PipeDream-2BW (ICML'21, 2006.09503), for models of repeated blocks: every width w and depth d with
  w x d = N, microbatch sizes that are powers of two, with and without recompute; the fastest that
  fits. A stage takes as long as the slowest device that holds it, and its links; replicas exchange
  gradients once in m microbatches.
- SPP (arXiv 2204.10562). Strongly linked devices stay together: the devices are cut in two where
  the links between the parts are weakest in sum (Stoer and Wagner, J. ACM 44(4)), each part again,
  and the parts stand side by side. The partition for this order is that of the bound's table.
- Pipe-Torch (CBD'19), for asynchronous training: the least maximum over stages of work x factor,
  and over links of 2 x output / bandwidth. A table over the first layers for each order of the
  devices; where there are many, the orders grow rank by rank and the best of each length are kept.
  (The paper was not at hand: this is its problem as others describe it.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import comb, inf
from typing import NamedTuple

from megatron_zbpp.ir import Placement
from megatron_zbpp.partitioning import replicated_stages
from megatron_zbpp.partitioning.bounds import Bounds
from megatron_zbpp.partitioning.layers import Devices, Layers
from megatron_zbpp.partitioning.space import Partition, Space

_VERSIONS = 2  # of the weights: what the name says
_SIZES = 1, 2, 4, 8  # samples of a microbatch


@dataclass(frozen=True)
class Configuration:
    """The configuration that is chosen."""

    width: int  # replicas of the pipeline (data parallel)
    depth: int  # stages of it
    microbatch: int  # samples of a microbatch
    num_microbatches: int  # of a batch on each replica
    recompute: bool  # whether activations are made again for the backward
    throughput: float  # samples a unit of time
    memory: float  # of the fullest device


def choices(layers: Layers, devices: Devices, batch: int) -> Iterator[Configuration]:
    """Yield what may be run, whether it fits or not.

    `layers` are for a microbatch of one sample; all times and memory grow with its size.
    """
    count = len(devices)
    for depth in (d for d in range(1, count + 1) if count % d == 0 and d <= len(layers)):
        width = count // depth
        for size in _SIZES:
            m, left = divmod(batch, width * size)
            if left or m < depth:
                continue
            for recompute in (False, True):
                time = _slowest(layers, devices, depth, size, recompute)
                exchange = _exchange(layers, devices, depth) / m
                memory = _memory(layers, depth, size, recompute)
                yield Configuration(
                    width, depth, size, m, recompute, width * size / max(time, exchange), memory
                )


def two_bw(layers: Layers, devices: Devices, batch: int) -> Configuration:
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
    kinds = [layers.sums(name)[-1] for name in ('forward', 'backward', 'weight')]
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


def min_cut_order(devices: Devices, output: float) -> tuple[int, ...]:
    """Return the devices in the order of a recursive minimum cut."""
    ranks = range(len(devices))
    times = [
        [devices.edge(a, b, output) + devices.edge(b, a, output) for b in ranks] for a in ranks
    ]
    positive = [t for row in times for t in row if t > 0]
    least = min(positive, default=1.0) / 1e3  # stands for links that take no time
    weights = [[1 / max(t, least) for t in row] for row in times]
    return tuple(_ordered(list(ranks), weights))


def _ordered(part: list[int], weights: Sequence[Sequence[float]]) -> list[int]:
    """Return the part in order: cut, and each side again; as it is where all links are alike."""
    links = {weights[a][b] for a in part for b in part if a != b}
    if len(part) < 3 or len(links) == 1:
        return part
    side = minimum_cut(part, weights)
    left = _ordered([d for d in part if (d in side) == (part[0] in side)], weights)
    right = _ordered([d for d in part if (d in side) != (part[0] in side)], weights)
    if weights[left[0]][right[0]] > weights[left[-1]][right[0]]:
        left.reverse()
    return left + right


def minimum_cut(part: Sequence[int], weights: Sequence[Sequence[float]]) -> set[int]:
    """Return one side of the cut of least weight (Stoer and Wagner); of equal ones the largest.

    >>> strong, weak = 5.0, 1.0
    >>> links = [[0, strong, weak, weak], [strong, 0, weak, weak],
    ...          [weak, weak, 0, strong], [weak, weak, strong, 0]]
    >>> sorted(minimum_cut(range(4), links))
    [2, 3]
    """
    merged = {d: {d} for d in part}
    own = {a: {b: weights[a][b] for b in part if b != a} for a in part}
    best: tuple[float, int, set[int]] | None = None
    while len(own) > 1:
        chosen: list[int] = []
        pull, cut = dict.fromkeys(own, 0.0), 0.0
        while pull:
            nearest = max(pull, key=lambda d: pull[d])
            cut = pull.pop(nearest)
            chosen.append(nearest)
            for other in pull:
                pull[other] += own[nearest][other]
        last, before = chosen[-1], chosen[-2]
        key = cut, -min(len(merged[last]), len(part) - len(merged[last]))
        if best is None or key < best[:2]:
            best = (*key, set(merged[last]))
        merged[before] |= merged.pop(last)
        for other, weight in own.pop(last).items():
            del own[other][last]
            if other != before:
                own[before][other] += weight
                own[other][before] += weight
    assert best is not None
    return best[2]


_ALL = 6  # devices of which every order is tried
_BEAM = 64

_Table = list[tuple[float, tuple[int, ...]]]  # by number of layers: slowest so far, cuts


def pipe_torch(layers: Layers, devices: Devices) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Return the slowest stage's or link's time, the cuts, and the device of each rank."""
    count = len(devices)
    if count <= _ALL:
        found: list[tuple[tuple[float, tuple[int, ...]], tuple[int, ...]]] = []
        for order in permutations(range(count)):
            table: _Table = []
            for at, device in enumerate(order):
                table = _extended(layers, devices, table, order[:at], device)
            found.append((table[len(layers)], order))
        (value, cuts), order = min(found, key=lambda entry: entry[0])
        return value, cuts, order
    linked = bool(devices.latency or devices.bandwidth)
    beam: list[tuple[_Table, tuple[int, ...]]] = [([], ())]
    for _ in range(count):
        grown = [
            (_extended(layers, devices, table, order, device), (*order, device))
            for table, order in beam
            for device in range(count)
            if device not in order
        ]
        kinds = {
            order if linked else tuple(devices.devices[d].factors for d in order): (table, order)
            for table, order in grown
        }
        beam = sorted(kinds.values(), key=lambda entry: _promise(layers, devices, *entry))[:_BEAM]
    table, order = min(beam, key=lambda entry: entry[0][len(layers)][0])
    return *table[len(layers)], order


def _extended(
    layers: Layers, devices: Devices, table: _Table, order: tuple[int, ...], device: int
) -> _Table:
    sums = [layers.sums(name) for name in ('forward', 'backward', 'weight')]
    factors = devices.devices[device].factors

    def work(start: int, end: int) -> float:
        return sum(f * (own[end] - own[start]) for f, own in zip(factors, sums, strict=True))

    if not order:
        return [(work(0, end) if end else inf, (end,)) for end in range(len(layers) + 1)]
    made: _Table = []
    for end in range(len(layers) + 1):
        best: tuple[float, tuple[int, ...]] = inf, ()
        for start in range(len(order), end):
            before, cuts = table[start]
            link = 2 * devices.edge(order[-1], device, layers.layers[start - 1].output)
            value = max(before, link, work(start, end))
            if value < best[0]:
                best = value, (*cuts, end - start)
        made.append(best)
    return made


def _promise(layers: Layers, devices: Devices, table: _Table, order: tuple[int, ...]) -> float:
    speeds = [1 / min(device.factors) for d, device in enumerate(devices.devices) if d not in order]
    if not speeds:
        return table[len(layers)][0]
    times = [layer.time for layer in layers]
    found, rest, longest = inf, 0.0, 0.0
    for end in range(len(layers) - 1, len(order) - 1, -1):
        rest, longest = rest + times[end], max(longest, times[end])
        found = min(found, max(table[end][0], rest / sum(speeds), longest / max(speeds)))
    return found


_MOST_PLANS = 100_000  # of DAPPLE, which are all looked at


class Choice(NamedTuple):
    """The choice of a strategy."""

    partition: Partition  # one device a stage, which Megatron can run
    estimate: str  # what its own plan is and takes, in words


def _pipedream(space: Space) -> Choice:
    bandwidth = _bandwidth('pipedream', space)
    times = [sum(each) for each in zip(*_times(space), strict=True)]
    inputs = times, *_sizes(space), len(space.devices), bandwidth
    value, stages = replicated_stages.pipedream(*inputs)
    _, straight = replicated_stages.pipedream(*inputs, straight=True)
    said = f'{value:g} between microbatches, {replicated_stages.admitted(stages)} admitted'
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
    whole = [b + w for b, w in zip(backward, weight, strict=True)]
    model = replicated_stages.Model(forward, whole, *_sizes(space))
    inputs = model, count, space.num_microbatches, bandwidth
    value, stages = replicated_stages.dapple(*inputs)
    _, straight = replicated_stages.dapple(*inputs, straight=True)
    return Choice(_straight(space, straight), _words('dapple', f'{value:g} a batch', stages))


def _pipe_torch(space: Space) -> Choice:
    value, cuts, order = pipe_torch(space.layers, space.devices)
    said = f'pipe-torch: {value:g} between microbatches, asynchronous'
    return Choice(Partition(Placement.loop(len(order)), cuts, order), said)


def _spp(space: Space) -> Choice:
    order = min_cut_order(space.devices, max(layer.output for layer in space.layers))
    cut = replace(space, devices=space.devices.ordered(order), keep_order=True)
    bound, cuts, _ = Bounds(cut).chain()
    said = (
        f'spp: devices in the order of a minimum cut, {", ".join(map(str, order))}; bound {bound:g}'
    )
    return Choice(Partition(Placement.loop(len(order)), cuts, order), said)


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
    f, b, w = space.devices.devices[0].factors
    times = ((f * x.forward, b * x.backward, w * x.weight) for x in space.layers)
    forward, backward, weight = map(list, zip(*times, strict=True))
    return forward, backward, weight


def _sizes(space: Space) -> tuple[list[float], list[float]]:
    return [x.output for x in space.layers], [x.parameters for x in space.layers]


def _straight(space: Space, stages: Sequence[replicated_stages.Replicated]) -> Partition:
    cuts = tuple(stage.end - stage.start for stage in stages)
    ranks = len(space.devices)
    return Partition(Placement.loop(ranks), cuts, tuple(range(ranks)))


def _words(name: str, value: str, stages: Sequence[replicated_stages.Replicated]) -> str:
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
