"""ZB-V: zero bubble in the memory of 1F1B, on a V placement."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import B, F, Pass, Placement, Schedule, W
from .family import TWO, Family


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V."""
    p, m = num_ranks, num_microbatches
    placement = Placement.v(p)
    orders = (
        [x for x in _closed_form(p, max(m, 2 * p - 1), rank) if x.microbatch < m]
        for rank in range(p)
    )
    return Schedule.of('zb-v', placement, m, orders)


def _closed_form(p: int, m: int, rank: int) -> Iterator[Pass]:
    """Order of one rank for m >= 2p-1."""
    down, up = rank, 2 * p - 1 - rank
    passes = {
        kind + chunk: iter([Pass(kind, stage, i) for i in range(m)])
        for kind in (F, B, W)
        for chunk, stage in (('0', down), ('1', up))
    }

    def emit(*kinds: str) -> Iterator[Pass]:
        return (x for kind in kinds for x in [next(passes[kind], None)] if x is not None)

    yield from emit(*['F0'] * (2 * (p - rank) - 1))
    yield from emit(*['F1', 'F0'] * rank)
    yield from emit(*['F1', 'B1', 'W1'] * (p - rank))
    yield from emit(*['F0', 'B0', 'W0', 'F1', 'B1', 'W1'] * (m - p))
    yield from emit(*['B0', 'B1'] * rank)
    yield from emit(*['B0', 'W0'] * (p - rank))
    yield from emit(*['W1'] * m, *['W0'] * m)


FAMILY = Family(
    name='zb-v',
    generate=zb_v,
    summary='zero bubble in the memory of 1F1B, on a V placement',
    bubble='0 (F=B=W, m >= 2p-1)',
    memory='p',
    source='Zero Bubble, arXiv 2401.10241, section 6',
    aliases=('ZBVZeroBubble', 'v-zb', 'zbv-formatted', 'zbvpp', 'zb'),
    chunks=TWO,
    default_chunks=2,
    min_ranks=2,
)
