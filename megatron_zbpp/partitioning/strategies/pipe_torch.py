"""Pipe-Torch (CBD'19): straight stages on unequal devices and links, over orders of the devices.

For asynchronous training: the least maximum over stages of work x factor, and over links of
2 x output / bandwidth. A table over the first layers for each order of the devices; where there are
many, the orders grow rank by rank and the best of each length are kept. (The paper was not at hand:
this is its problem as others describe it.)
"""

from __future__ import annotations

from itertools import permutations
from math import inf

from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layers import Layers

_ALL = 6  # devices of which every order is tried
_BEAM = 64

_Table = list[tuple[float, tuple[int, ...]]]  # by number of layers: slowest so far, cuts


def pipe_torch(layers: Layers, devices: Devices) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Return the slowest stage's or link's time, the cuts, and the device of each rank."""
    count = len(devices)
    if count <= _ALL:
        found = [
            (_extended_to(layers, devices, order), order) for order in permutations(range(count))
        ]
        (value, cuts), order = min(found, key=lambda entry: entry[0])
        return value, cuts, order
    beam: list[tuple[_Table, tuple[int, ...]]] = [([], ())]
    for _ in range(count):
        grown = [
            (_extended(layers, devices, table, order, device), (*order, device))
            for table, order in beam
            for device in range(count)
            if device not in order
        ]
        kinds = {_kind(devices, order): (table, order) for table, order in grown}
        ranked = sorted(kinds.values(), key=lambda entry: _promise(layers, devices, *entry))
        beam = ranked[:_BEAM]
    table, order = min(beam, key=lambda entry: entry[0][len(layers)][0])
    return *table[len(layers)], order


def _extended_to(
    layers: Layers, devices: Devices, order: tuple[int, ...]
) -> tuple[float, tuple[int, ...]]:
    table: _Table = []
    for at, device in enumerate(order):
        table = _extended(layers, devices, table, order[:at], device)
    return table[len(layers)]


def _extended(
    layers: Layers, devices: Devices, table: _Table, order: tuple[int, ...], device: int
) -> _Table:
    """Return the table with one more stage, on `device`."""
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


def _kind(devices: Devices, order: tuple[int, ...]) -> object:
    linked = bool(devices.latency or devices.bandwidth)
    return order if linked else tuple(devices.devices[d].factors for d in order)


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
