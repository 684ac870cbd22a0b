"""ZB-V: zero bubble in the memory of 1F1B, on a V placement."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zbpp.ir import B, F, Pass, Placement, Schedule, W
from megatron_zbpp.schedules.construct.list_scheduling import dispatch
from megatron_zbpp.schedules.family import TWO, Family


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: rank s holds stages s and 2p-1-s, so that the first rank to start also has the loss.

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6, in closed form. With
    fewer than 2p-1 microbatches (where the paper leaves the order to its scheduler) it is the
    order of 2p-1 without the missing ones, and Ws wherever a rank would wait.

    - Bubble where F=B=W: 0 within each rank's window for m >= 2p-1, (p-1)/2 of the makespan, since
      rank p-1 starts as much later. For p <= m < 2p-1 the window has (2p-1-m)/2 and the makespan
      still (p-1)/2; for m < p both grow to that of the lone microbatch, 2p-5/2 at m = 1.
    - Peak memory: p activations on every rank, never more; at most m.
    - When: the first choice at the memory of 1F1B. It sends twice the messages (none at the fold on
      rank p-1), and F, B and W that differ bring some bubble back (p=8, m=24, 1/1.2/0.8: 5.5 % of
      the makespan), which a planned schedule avoids. `zb-interleaved` with more chunks can be
      better still where messages cost little.
    """
    p, m = num_ranks, num_microbatches
    placement = Placement.v(p)
    full = max(m, 2 * p - 1)
    orders = [[x for x in _closed_form(p, full, rank) if x.microbatch < m] for rank in range(p)]
    if m == full:
        return Schedule.of('zb-v', placement, m, orders)
    lanes = [[[x for x in order if x.kind != W]] for order in orders]
    return dispatch(placement, m, lanes, memory_limit=p).schedule('zb-v')


def _closed_form(p: int, m: int, rank: int) -> Iterator[Pass]:
    """One rank's order for m >= 2p-1; F0 is a forward of chunk 0, and so on."""
    left = {
        f'{kind}{chunk}': iter([Pass(kind, stage, i) for i in range(m)])
        for kind in (F, B, W)
        for chunk, stage in enumerate((rank, 2 * p - 1 - rank))
    }

    def emit(times: int, *names: str) -> Iterator[Pass]:
        for name in names * times:
            yield from (x for x in [next(left[name], None)] if x is not None)

    yield from emit(2 * (p - rank) - 1, 'F0')
    yield from emit(rank, 'F1', 'F0')
    yield from emit(p - rank, 'F1', 'B1', 'W1')
    yield from emit(m - p, 'F0', 'B0', 'W0', 'F1', 'B1', 'W1')
    yield from emit(rank, 'B0', 'B1')
    yield from emit(p - rank, 'B0', 'W0')
    yield from emit(m, 'W1')
    yield from emit(m, 'W0')


FAMILY = Family(
    name='zb-v',
    generate=zb_v,
    summary='no bubble in any window, in the memory of 1F1B, on a V placement',
    bubble='0 (F=B=W, m >= 2p-1)',
    memory='p',
    source='Zero Bubble, arXiv 2401.10241, section 6',
    aliases=('ZBVZeroBubble', 'ScheduleZBVZeroBubble', 'V-ZB', 'zbv-formatted', 'ZBVPP', 'zb'),
    chunks=TWO,
    default_chunks=2,
    min_ranks=2,
)
