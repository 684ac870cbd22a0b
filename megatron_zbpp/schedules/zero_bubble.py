"""Handcrafted orders of B and W: ZB-H1, ZB-H2 and 2BP on a loop, ZB-V on a V placement."""

from __future__ import annotations

from math import inf

from megatron_zbpp.ir import Phase, Placement, Schedule, W
from megatron_zbpp.schedules.construct.phases import phases, split_one_forward_one_backward


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients wait, so that every rank's last Bs come earlier.

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.3.1. Rank s lets s
    Bs go ahead of their Ws: as many activations as 1F1B holds on rank 0 and does not hold here.

        >>> print(grid(zb_h1(3, 5), width=76))
        rank 0   0F0  0F1  0F2  0B0  0W0  0F3  0B1  0W1  0F4  0B2  0W2  0B3  0W3…
        rank 1   1F0  1F1  1B0  1F2  1B1  1W0  1F3  1B2  1W1  1F4  1B3  1W2  1B4…
        rank 2   2F0  2B0  2F1  2B1  2F2  2B2  2W0  2F3  2B3  2W1  2F4  2B4  2W2…

    - Bubble: (p-1)(F+B-W): a third of 1F1B's where F=B=W.
    - Peak memory: p activations on every rank, of which rank s holds s for W only: what B gives
      back of those is gone.
    """
    return _handcrafted('zb-h1', num_ranks, num_microbatches, laps=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: enough forwards up front to fill the whole warm-up, so that no rank ever waits.

    Qi et al., arXiv 2401.10241, section 2.3.2.

        >>> print(grid(zb_h2(3, 5), width=76))
        rank 0   0F0  0F1  0F2  0F3  0F4  0B0  0W0  0B1  0W1  0B2  0W2  0B3  0W3…
        rank 1   1F0  1F1  1F2  1B0  1F3  1B1  1F4  1B2  1W0  1B3  1W1  1B4  1W2…
        rank 2   2F0  2B0  2F1  2B1  2F2  2B2  2F3  2B3  2F4  2B4  2W0  2W1  2W2…

    - Bubble: (p-1)(F+B-2W) within each rank's window: 0 where F=B=W and m >= 2p-1. Windows are
      skewed: rank s starts s F later. Makespan, which counts where all ranks meet before the
      optimizer step, is ZB-H1's.
    """
    return _handcrafted('zb-h2', num_ranks, num_microbatches, laps=2)


def _handcrafted(name: str, num_ranks: int, num_microbatches: int, laps: int) -> Schedule:
    """Return warm-up and deferral of ZB-H1 (`laps` 1) or of ZB-H2 (`laps` 2) on every rank."""
    m = num_microbatches
    orders = (
        split_one_forward_one_backward(
            [rank], [m], ahead=laps * (num_ranks - 1 - rank), defer=laps * rank
        )
        for rank in range(num_ranks)
    )
    return Schedule.of(name, Placement.loop(num_ranks), m, orders)


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
    from megatron_zbpp.schedules.construct.draft import list_schedule  # for few schedules

    lanes = [[[p for p in order if p.kind != W]] for order in schedule.passes]
    m, graph = schedule.num_microbatches, schedule.graph
    draft = list_schedule(schedule.placement, m, lanes, memory_limit, graph)
    return draft.schedule(schedule.name)


def closed_form(p: int, m: int, rank: int, ahead: int = 0) -> list[Phase]:
    """Return a rank's order for m >= 2p-1 + ahead, and of fewer that without what is missing.

    `ahead`: further forwards of each chunk before the first backward.
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


def two_bp(num_ranks: int, num_microbatches: int) -> Schedule:
    """2BP on GPipe: no rank waits for the weight gradients of another.

    Rae et al., 2BP: 2-Stage Backpropagation, arXiv 2405.18047: backward-p1 is B, backward-p2 is W.
    The paper concatenates the microbatches of all backward-p2; here they stay one pass each, so
    that gradients add up to the same bits.

        >>> print(grid(two_bp(2, 3)))
        rank 0   0F0  0F1  0F2  0B0  0B1  0B2  0W0  0W1  0W2
        rank 1   1F0  1F1  1F2  1B0  1B1  1B2  1W0  1W1  1W2

    - Bubble: (p-1)(F+B), two thirds of GPipe's where F=B=W.
    """
    m = num_microbatches
    table = [(m, 'F', 'forwards'), (m, 'B', 'input gradients'), (m, 'W', 'weight gradients')]
    orders = (phases([rank], m, table) for rank in range(num_ranks))
    return Schedule.of('2bp', Placement.loop(num_ranks), m, orders)


def two_bp_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """2BP on 1F1B: F and B as in 1F1B, W where a rank would wait, and what is left at the end.

    Rae et al., 2BP, arXiv 2405.18047: 1F1B-1 is m = p, 1F1B-2 is m = 2p.

        >>> print(grid(two_bp_1f1b(3, 4), width=76))
        rank 0   0F0  0F1  0F2  0B0  0F3  0B1  0W0  0B2  0W1  0B3  0W2  0W3
        rank 1   1F0  1F1  1B0  1F2  1B1  1F3  1B2  1W0  1B3  1W1  1W2  1W3
        rank 2   2F0  2B0  2F1  2B1  2F2  2B2  2F3  2B3  2W0  2W1  2W2  2W3

    - Bubble: (p-1)(F+B-W) for m >= p, as ZB-H1's, which needs 2p-1.
    - Peak memory: m activations on the last rank, whose W all come at the end.
    """
    p, m = num_ranks, num_microbatches
    tables = ([(p - 1 - rank, 'F', ''), (m, 'F B', ''), (m, 'W', '')] for rank in range(p))
    orders = (phases([rank], m, table) for rank, table in enumerate(tables))
    return filled(Schedule.of('2bp-1f1b', Placement.loop(p), m, orders), memory_limit=inf)
