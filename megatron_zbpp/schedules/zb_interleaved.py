"""Interleaved zero bubble: ZB-H1's deferral over several chunks a rank."""

from __future__ import annotations

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules.construct.groups import even_groups
from megatron_zbpp.schedules.construct.orders import split_one_forward_one_backward
from megatron_zbpp.schedules.registry import Formula, family


@family(
    'zb-interleaved',
    summary='interleaved 1F1B with deferred weight gradients',
    bubble=Formula(
        '(p-1)(F+B-W)/v',
        lambda at: (at.p - 1) * (at.F + at.B - at.W) / at.v,
        lambda at: at.m >= at.p and at.equal,
    ),
    memory=Formula(
        'p',
        lambda at: ((at.v - 1) * even_groups(at.m, at.p)[0] + at.p) / at.v,
        lambda at: at.m >= at.p,
    ),
    source='Zero Bubble, arXiv 2401.10241, section 2.3.1, on the loop placement, as in torch',
    aliases=('InterleavedZeroBubble', 'ScheduleInterleavedZeroBubble'),
)
def zb_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B with half its extra warm-up, and rank s deferring s weight gradients.

    What torch calls ScheduleInterleavedZeroBubble; section 2.3.1 of Zero Bubble (Qi et al., arXiv
    2401.10241) on the placement of interleaved 1F1B. Groups as in `interleaved`.

        >>> print(grid(zb_interleaved(2, 4), width=76))
        rank 0   0F0  0F1  2F0  2F1  2B0  2W0  0F2  2B1  2W1  0F3  0B0  0W0  2F2…
        rank 1   1F0  1F1  3F0  3B0  3F1  3B1  3W0  1F2  1B0  3W1  1F3  1B1  1W0…

    - Bubble: (p-1)(F+B-W)/v for m >= p, more below.
    - Peak memory: ((v-1)g + p)/v activations for groups of up to g: p where p divides m.
    - When: layers divide into many chunks and links are fast: from v = 3 on its makespan is shorter
      than `zb-v`'s in the same memory, also where F, B and W differ (p=8, m=24, 1/1.2/0.8, v=4:
      3.3 % bubble). It sends v times the messages of `zb-h1`, and its short warm-up hides none of
      their latency; at a tenth of F a message that lead is gone. With v = 1 it is ZB-H1.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    groups = even_groups(num_microbatches, num_ranks)
    orders = (
        split_one_forward_one_backward(
            placement.stages(rank), groups, ahead=num_ranks - 1 - rank, defer=rank
        )
        for rank in range(num_ranks)
    )
    return Schedule.of('zb-interleaved', placement, num_microbatches, orders)
