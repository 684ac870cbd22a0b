"""ZB-H1 and ZB-H2: the handcrafted zero-bubble schedules, one stage a rank."""

from __future__ import annotations

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules.construct.phases import split_one_forward_one_backward


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
