"""Breadth-first: every chunk runs all microbatches before the next chunk starts."""

from __future__ import annotations

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules.construct.phases import phases
from megatron_zbpp.schedules.registry import Formula, family


@family(
    'breadth-first',
    summary='chunk by chunk through all microbatches, for FSDP',
    bubble=Formula('(p-1)(F+B+W)/v', lambda at: (at.p - 1) * at.S / at.v, lambda at: at.m >= at.p),
    memory=Formula('m', lambda at: at.m),
    source='Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4',
    aliases=('LoopedBFS', 'ScheduleLoopedBFS', 'BFPP'),
)
def breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Breadth-first: all forwards of chunk 0, then of chunk 1, ...; then backwards the other way.

    Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4. Within a chunk
    backwards come in ascending order of microbatches (torch's ScheduleLoopedBFS runs them in
    descending order), so that gradients add up to the same bits.

        >>> print(grid(breadth_first(2, 2)))
        rank 0   0F0   0F1   2F0   2F1   2BW0  2BW1  0BW0  0BW1
        rank 1   1F0   1F1   3F0   3F1   3BW0  3BW1  1BW0  1BW1

    - Bubble: (p-1)(F+B+W)/v for m >= p; below, (p-m)(v-1)(F+B+W)/v more.
    - Peak memory: m activations on every rank.
    - When: with FSDP and a small m: the weights of a chunk are needed in one stretch for the
      forward and one for the backward, so they are gathered twice a step whatever m is. For
      anything else `interleaved` has the same bubble in less memory.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    each = num_chunks * num_microbatches
    table = [(each, 'F', 'forwards'), (each, 'BW', 'backwards')]
    orders = (phases(placement.stages(rank), num_microbatches, table) for rank in range(num_ranks))
    return Schedule.of('breadth-first', placement, num_microbatches, orders)
