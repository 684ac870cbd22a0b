"""Interleaved zero bubble: ZB-H1's deferral over several chunks a rank."""

from __future__ import annotations

from megatron_zbpp.ir import B, Placement, Schedule
from megatron_zbpp.schedules.construct.orders import defer_weights, even_groups
from megatron_zbpp.schedules.family import ANY, Family
from megatron_zbpp.schedules.interleaved import in_groups


def zb_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B with half its extra warm-up, and rank s deferring s weight gradients.

    What torch calls ScheduleInterleavedZeroBubble; section 2.3.1 of Zero Bubble (Qi et al., arXiv
    2401.10241) on the placement of interleaved 1F1B. Groups as in `interleaved`.

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
        defer_weights(in_groups(B, placement, rank, groups, num_ranks - 1 - rank), defer=rank)
        for rank in range(num_ranks)
    )
    return Schedule.of('zb-interleaved', placement, num_microbatches, orders)


FAMILY = Family(
    name='zb-interleaved',
    generate=zb_interleaved,
    summary='interleaved 1F1B with deferred weight gradients',
    bubble='(p-1)(F+B-W)/v',
    memory='p',
    source='Zero Bubble, arXiv 2401.10241, section 2.3.1, on the loop placement, as in torch',
    aliases=('InterleavedZeroBubble', 'ScheduleInterleavedZeroBubble'),
    chunks=ANY,
    default_chunks=2,
    options=('num_chunks',),
)
