"""Interleaved 1F1B: several chunks a rank on a loop, Megatron's own schedule for them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules.construct.groups import even_groups
from megatron_zbpp.schedules.construct.orders import one_forward_one_backward
from megatron_zbpp.schedules.registry import Formula, Sizes, family


def _peak(at: Sizes) -> float:
    """Return (v-1)g + 2p-1 activations of a chunk on rank 0, in groups of up to g; v = 1: p."""
    largest = even_groups(at.m, at.p)[0]
    stride = 2 if at.v > 1 else 1
    return min(at.m, ((at.v - 1) * largest + stride * (at.p - 1) + 1) / at.v)


@family(
    'interleaved',
    summary='1F1B over several chunks a rank, a v-th of the bubble',
    bubble=Formula('(p-1)(F+B+W)/v', lambda at: (at.p - 1) * at.S / at.v, lambda at: at.m >= at.p),
    memory=Formula('p + (p-1)/v', _peak),
    source='Megatron-LM, arXiv 2104.04473, section 2.2',
    aliases=(
        'Interleaved1F1B',
        'ScheduleInterleaved1F1B',
        'with-interleaving',
        '1F1B-Interleaved',
        '1F1B-I',
        'VPP',
    ),
)
def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: groups of p microbatches go through chunk after chunk of each rank.

    Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2. Where m is no multiple of p, the
    groups are as even as can be and none smaller than p, which keeps the bubble below for every
    m >= p (a short last group, as one might expect, would cost more than it saves, or deadlock).

        >>> print(grid(interleaved(2, 4), width=76))
        rank 0   0F0   0F1   2F0   2F1   0F2   2BW0  0F3   2BW1  2F2   0BW0  2F3…
        rank 1   1F0   1F1   3F0   3BW0  3F1   3BW1  1F2   1BW0  1F3   1BW1  3F2…

    - Bubble: (p-1)(F+B+W)/v for m >= p; below, (p-m)(v-1)(F+B+W)/v more.
    - Peak memory: ((v-1)g + 2p-1)/v activations on rank 0 for groups of up to g: for g = p that is
      p(1 + (p-1)/(pv)). At most m.
    - When: with fast links and p small against m. It sends v times the messages of 1F1B; measured
      gains (Zero Bubble, table 4) stay well below what the bubble promises. `zb-interleaved` has a
      third of the bubble (F=B=W) in less memory. With v = 1 it is 1F1B.
    """
    return in_groups(num_ranks, num_chunks, even_groups(num_microbatches, num_ranks))


def in_groups(num_ranks: int, num_chunks: int, groups: Sequence[int]) -> Schedule:
    """Return interleaved 1F1B whose microbatches go chunk by chunk in groups of these sizes."""
    placement = Placement.loop(num_ranks, num_chunks)
    # Two more forwards for each rank below hide the trip of a gradient; one will do without chunks.
    stride = 2 if num_chunks > 1 else 1
    orders = (
        one_forward_one_backward(placement.stages(rank), groups, stride * (num_ranks - 1 - rank))
        for rank in range(num_ranks)
    )
    return Schedule.of('interleaved', placement, sum(groups), orders)
