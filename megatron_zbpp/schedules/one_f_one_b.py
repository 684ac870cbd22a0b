"""1F1B: the schedule that everything else is measured against."""

from __future__ import annotations

from megatron_zbpp.ir import BW, F, Pass, Placement, Schedule
from megatron_zbpp.schedules.construct.orders import one_forward_one_backward
from megatron_zbpp.schedules.family import Family


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: each rank runs just enough forwards to feed its successors, then F and BW by turns.

    The same order goes by PipeDream-Flush (Narayanan et al., arXiv 2006.09503, section 3.2) and by
    DAPPLE's early backward (Fan et al., arXiv 2007.01045). Megatron's own schedule without chunks.

    - Bubble: (p-1)(F+B+W).
    - Peak memory: p activations on rank 0, p-s on rank s; at most m.
    - When: as the reference. `zb-h1` has a third of its bubble (F=B=W) in the same memory. It is
      still the choice where the backward cannot be split, or where m is so large that (p-1)/m is
      small.
    """
    m = num_microbatches
    orders = (
        one_forward_one_backward(
            [Pass(F, rank, i) for i in range(m)],
            [Pass(BW, rank, i) for i in range(m)],
            warmup=num_ranks - 1 - rank,
        )
        for rank in range(num_ranks)
    )
    return Schedule.of('1f1b', Placement.loop(num_ranks), m, orders)


FAMILY = Family(
    name='1f1b',
    generate=one_f_one_b,
    summary='one forward and one backward by turns: the reference',
    bubble='(p-1)(F+B+W)',
    memory='p',
    source='PipeDream-2BW, arXiv 2006.09503, section 3.2; DAPPLE, arXiv 2007.01045',
    aliases=('PipeDream-Flush', 'DAPPLE', 'Schedule1F1B', 'without-interleaving'),
)
