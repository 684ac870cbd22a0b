"""ZB-V: zero bubble in the memory of 1F1B, on a V placement."""

from __future__ import annotations

from megatron_zbpp.ir import Phase, Placement, Schedule, W
from megatron_zbpp.schedules.construct.draft import list_schedule
from megatron_zbpp.schedules.construct.phases import phases


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: rank s holds stages s and 2p-1-s, so that the first rank to start also has the loss.

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6, in closed form. With
    fewer than 2p-1 microbatches (where the paper leaves the order to its scheduler) it is the
    order of 2p-1 without the missing ones, and Ws wherever a rank would wait.

        >>> print(grid(zb_v(2, 4), width=76))
        rank 0   0F0  0F1  0F2  3F0  3B0  3W0  3F1  3B1  3W1  0F3  0B0  0W0  3F2…
        rank 1   1F0  2F0  1F1  2F1  2B0  2W0  1F2  1B0  1W0  2F2  2B1  2W1  1F3…

    - Bubble where F=B=W: 0 within each rank's window for m >= 2p-1; the makespan is (p-1)/2
      longer, since rank p-1 starts as much later. For p <= m < 2p-1 the window has (2p-1-m)/2 and
      the makespan still (p-1)/2; for m < p both grow to the lone microbatch's, 2p-5/2 at m = 1.
    - Peak memory: p activations on every rank, never more; at most m.
    """
    p, m = num_ranks, num_microbatches
    placement = Placement.v(p)
    orders = (closed_form(p, m, rank) for rank in range(p))
    schedule = Schedule.of('zb-v', placement, m, orders)
    return schedule if m >= 2 * p - 1 else filled(schedule, memory_limit=p)


def filled(schedule: Schedule, memory_limit: float) -> Schedule:
    """Return the same order but for its Ws, which come wherever a rank would wait."""
    lanes = [[[p for p in order if p.kind != W]] for order in schedule.passes]
    m, graph = schedule.num_microbatches, schedule.graph
    draft = list_schedule(schedule.placement, m, lanes, memory_limit, graph)
    return draft.schedule(schedule.name)


def closed_form(p: int, m: int, rank: int, ahead: int = 0) -> list[Phase]:
    """Return a rank's order for m >= 2p-1 + ahead, and of fewer that without what is missing.

    Args:
        p: ranks.
        m: microbatches.
        rank: of these.
        ahead: further forwards of each chunk before the first backward.
    """
    table = [
        (2 * (p - rank) - 1, 'F0', 'warm-up: chunk 0'),
        (rank + ahead, 'F1 F0', 'warm-up: both chunks'),
        (p - rank, 'F1 B1 W1', 'first backwards'),
        (max(m, 2 * p - 1 + ahead) - p - ahead, 'F0 B0 W0 F1 B1 W1', 'steady'),
        (rank, 'B0 B1', 'cool-down: both chunks'),
        (p - rank + ahead, 'B1 B0 W0', 'cool-down: chunk 0'),
        (m, 'W1', 'W left of chunk 1'),
        (m, 'W0', 'W left of chunk 0'),
    ]
    return phases([rank, 2 * p - 1 - rank], m, table)
