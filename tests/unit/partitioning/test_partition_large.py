"""Large pipelines: two kinds of devices, two kinds of links, near the bound of all partitions."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_zbpp import Device, Devices, Layer, Layers, Placement, check, partition
from megatron_zbpp.partitioning.search import swapped
from megatron_zbpp.partitioning.space import Partition


def test_many_devices_change_places_at_distances_that_are_powers_of_two():
    many = 18
    devices = Devices(tuple(Device(str(at), (1.0 + at,) * 3) for at in range(many)))
    space: Any = SimpleNamespace(
        layers=(Layer('t', 1, 1, 1),), devices=devices, limits=(inf,) * many
    )
    partition = Partition(Placement.loop(many), (1,) * many, tuple(range(many)))
    found = [other.order for other in swapped(space, partition)]
    apart = [[at for at, device in enumerate(order) if at != device] for order in found]
    assert {b - a for a, b in apart} == {1, 2, 4, 8, 16}
    assert len(found) == sum(many - distance for distance in (1, 2, 4, 8, 16))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ('p', 'num_layers', 'm', 'seconds'), [(16, 96, 128, 55), (128, 512, 256, 240)]
)
def test_near_the_bound(p, num_layers, m, seconds):
    """On two cores in 60 seconds, and in 10 minutes."""
    decoder = Layer('t', 4, 4, 3, output=1)
    ends = Layer('E', 1, 0, 1, output=1), Layer('L', 12, 12, 12)
    model = Layers((ends[0], *[decoder] * (num_layers - 2), ends[1]))
    kinds = [(1.0 + 0.4 * (rank % 2),) * 3 for rank in range(p)]
    node = p // 4
    latency = tuple(
        tuple(0.0 if a == b else 0.5 if a // node == b // node else 3.0 for b in range(p))
        for a in range(p)
    )
    devices = Devices(tuple(Device(str(at), kind) for at, kind in enumerate(kinds)), latency)
    plan = partition(model, devices, m, placements=[Placement.loop(p)], seconds=seconds)
    check(plan.schedule)
    assert plan.lower_bound <= plan.value <= 1.01 * plan.lower_bound
    assert plan.value < 0.7 * plan.even
