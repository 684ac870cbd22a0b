"""Interleaved 1F1B: several chunks a rank on a loop, Megatron's own schedule for them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zbpp.ir import BW, F, Pass, Placement, Schedule
from megatron_zbpp.schedules.construct.orders import (
    chunk_by_chunk,
    even_groups,
    one_forward_one_backward,
)
from megatron_zbpp.schedules.family import ANY, Family


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: groups of p microbatches go through chunk after chunk of each rank.

    Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2. Where m is no multiple of p, the
    groups are as even as can be and none smaller than p, which keeps the bubble below for every
    m >= p (a short last group, as one might expect, would cost more than it saves, or deadlock).

    - Bubble: (p-1)(F+B+W)/v for m >= p; below, (p-m)(v-1)(F+B+W)/v more.
    - Peak memory: ((v-1)g + 2p-1)/v activations on rank 0 for groups of up to g: for g = p that is
      p(1 + (p-1)/(pv)). At most m.
    - When: with fast links and p small against m. It sends v times the messages of 1F1B; measured
      gains (Zero Bubble, table 4) stay well below what the bubble promises. `zb-interleaved` has a
      third of the bubble (F=B=W) in less memory. With v = 1 it is 1F1B.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    groups = even_groups(num_microbatches, num_ranks)
    # Two more forwards for each rank below hide the trip of a gradient; one will do without chunks.
    stride = 2 if num_chunks > 1 else 1
    orders = (
        in_groups(BW, placement, rank, groups, stride * (num_ranks - 1 - rank))
        for rank in range(num_ranks)
    )
    return Schedule.of('interleaved', placement, num_microbatches, orders)


def in_groups(
    kind: str, placement: Placement, rank: int, groups: list[int], ahead: int
) -> Iterator[Pass]:
    """F and `kind` by turns, each chunk by chunk in groups.

    Args:
        kind: of the backwards: B or BW.
        placement: a loop.
        rank: whose order it is.
        groups: sizes, the largest first.
        ahead: forwards in the warm-up beyond those of all chunks but the last.
    """
    stages = placement.stages(rank)
    return one_forward_one_backward(
        chunk_by_chunk(F, stages, groups),
        chunk_by_chunk(kind, stages, groups),
        warmup=(len(stages) - 1) * groups[0] + ahead,
    )


FAMILY = Family(
    name='interleaved',
    generate=interleaved,
    summary='1F1B over several chunks a rank, a v-th of the bubble',
    bubble='(p-1)(F+B+W)/v',
    memory='p + (p-1)/v',
    source='Megatron-LM, arXiv 2104.04473, section 2.2',
    aliases=(
        'Interleaved1F1B',
        'ScheduleInterleaved1F1B',
        'with-interleaving',
        '1F1B-Interleaved',
        '1F1B-I',
        'VPP',
    ),
    chunks=ANY,
    default_chunks=2,
    options=('num_chunks',),
)
