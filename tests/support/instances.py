"""Partitions with known optima: layers of (F, B, W), one activation each; devices; sizes.

Each optimum was proven apart from this library: of 1F1B by trying every partition and order of
devices, of split schedules by CP-SAT on every partition whose bound is not above it.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron_zbpp import Device, Devices, Layer, Layers, Placement


@dataclass(frozen=True)
class Instance:
    layers: Layers  # of the case
    devices: Devices | int
    m: int
    fused: float | None  # makespan of the best 1F1B; None: it is not asked for
    split: float  # of the best order of F, B and W
    # of partitions that reach the optima; () where that was not recorded
    cuts: tuple[tuple[int, ...], ...] = ()
    more: dict[str, Any] = field(default_factory=dict)  # arguments of `partition`


def p6(at: Placement, fused: float | None, split: float, *cuts: tuple, **more: Any) -> Instance:
    return Instance(P6, 2, 4, fused, split, cuts, {'placements': [at]} | more)


def layers(*times: tuple[float, float, float], kinds: str = '') -> Layers:
    kinds = kinds or 't' * len(times)
    return Layers(tuple(Layer(kind, *own) for kind, own in zip(kinds, times, strict=True)))


P1 = layers((1, 0, 1), *[(2, 2, 2)] * 6, (4, 4, 4), kinds='EttttttL')
P2 = layers((3, 3, 2), (1, 2, 1), (4, 4, 3), (1, 1, 1), (5, 6, 4), (2, 2, 2), (6, 5, 5), (2, 3, 1))
P3 = layers(*[(1, 1, 1)] * 9)
P4 = layers(*[(2, 2, 2)] * 8)
P6 = layers((1, 0, 1), *[(2, 2, 2)] * 5, (3, 3, 3), kinds='EtttttL')
P8 = layers((1, 0, 1), *[(4, 4, 3)] * 14, (9, 9, 9), kinds='E' + 't' * 14 + 'L')
ONE_SLOW = Devices((Device('a'), Device('b'), Device('slow', (2.0, 2.0, 2.0))))
NODES = Devices(  # 0 and 2 share one, 1 and 3 another
    tuple(Device(str(rank)) for rank in range(4)),
    tuple(tuple(4.0 * ((a + b) % 2) for b in range(4)) for a in range(4)),
)
LOOP, V, LOOP2 = Placement.loop(2), Placement.v(2), Placement.loop(2, 2)
LOW = {'memory_limit': 8}

INSTANCES = {
    'P1': Instance(P1, 4, 4, 86, 65, ((3, 2, 2, 1),)),
    'P1m': Instance(P1, 4, 4, 98, 83, ((2, 2, 3, 1), (2, 2, 2, 2)), LOW),
    'P2': Instance(P2, 3, 5, 163, 128, ((3, 3, 2),)),
    'P3': Instance(P3, ONE_SLOW, 6, 86, 76, ((4, 4, 1), (4, 2, 3), (2, 4, 3))),
    'P4': Instance(P4, NODES, 4, 94, 68, ((2, 2, 2, 2), (3, 1, 2, 2), (3, 2, 1, 2))),
    'P6': p6(LOOP, 104, 91, (4, 3)),
    'P6 V': p6(V, None, 92, (2, 1, 2, 2), (2, 2, 1, 2), (3, 1, 2, 1), (3, 2, 1, 1)),
    'P6 loop': p6(LOOP2, None, 85, (1, 2, 3, 1)),
    'P6m': p6(LOOP, 104, 91, (4, 3), **LOW),
    'P6m V': p6(V, None, 92, (2, 1, 2, 2), (2, 2, 1, 2), **LOW),
    'P6m loop': p6(LOOP2, None, 87, (1, 2, 3, 1), (2, 2, 2, 1), **LOW),
    'P8': Instance(P8, 4, 8, 526, 441, ((5, 4, 4, 3),)),
}
