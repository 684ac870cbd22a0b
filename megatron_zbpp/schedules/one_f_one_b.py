"""1F1B: the schedule that everything else is measured against."""

from __future__ import annotations

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules.construct.orders import one_forward_one_backward
from megatron_zbpp.schedules.registry import Formula, family


@family(
    '1f1b',
    summary='one forward and one backward by turns: the reference',
    bubble=Formula('(p-1)(F+B+W)', lambda at: (at.p - 1) * at.S),
    memory=Formula('p', lambda at: min(at.p, at.m)),
    source='PipeDream-2BW, arXiv 2006.09503, section 3.2; DAPPLE, arXiv 2007.01045',
    aliases=('PipeDream-Flush', 'DAPPLE', 'Schedule1F1B', 'without-interleaving'),
)
def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: each rank runs just enough forwards to feed its successors, then F and BW by turns.

    The same order goes by PipeDream-Flush (Narayanan et al., arXiv 2006.09503, section 3.2) and by
    DAPPLE's early backward (Fan et al., arXiv 2007.01045). Megatron's own schedule without chunks.

        >>> print(grid(one_f_one_b(4, 6), width=76))
        rank 0   0F0   0F1   0F2   0F3   0BW0  0F4   0BW1  0F5   0BW2  0BW3  0BW4…
        rank 1   1F0   1F1   1F2   1BW0  1F3   1BW1  1F4   1BW2  1F5   1BW3  1BW4…
        rank 2   2F0   2F1   2BW0  2F2   2BW1  2F3   2BW2  2F4   2BW3  2F5   2BW4…
        rank 3   3F0   3BW0  3F1   3BW1  3F2   3BW2  3F3   3BW3  3F4   3BW4  3F5…

    - Bubble: (p-1)(F+B+W).
    - Peak memory: p activations on rank 0, p-s on rank s; at most m.
    - When: as the reference. `zb-h1` has a third of its bubble (F=B=W) in the same memory. It is
      still the choice where the backward cannot be split, or where m is so large that (p-1)/m is
      small.
    """
    m = num_microbatches
    orders = (
        one_forward_one_backward([rank], [m], ahead=num_ranks - 1 - rank)
        for rank in range(num_ranks)
    )
    return Schedule.of('1f1b', Placement.loop(num_ranks), m, orders)
