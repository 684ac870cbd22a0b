"""Breadth-first: every chunk runs all microbatches before the next chunk starts."""

from __future__ import annotations

from megatron_zbpp.ir import BW, F, Placement, Schedule
from megatron_zbpp.schedules.construct.orders import chunk_by_chunk
from megatron_zbpp.schedules.family import ANY, Family


def breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Breadth-first: all forwards of chunk 0, then of chunk 1, ...; then backwards the other way.

    Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4. Within a chunk
    backwards come in ascending order of microbatches (torch's ScheduleLoopedBFS runs them in
    descending order), so that gradients add up to the same bits.

    - Bubble: (p-1)(F+B+W)/v for m >= p; below, (p-m)(v-1)(F+B+W)/v more.
    - Peak memory: m activations on every rank.
    - When: with FSDP and a small m: the weights of a chunk are needed in one stretch for the
      forward and one for the backward, so they are gathered twice a step whatever m is. For
      anything else `interleaved` has the same bubble in less memory.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    orders = (
        chunk_by_chunk(F, placement.stages(rank), [num_microbatches])
        + chunk_by_chunk(BW, placement.stages(rank), [num_microbatches])
        for rank in range(num_ranks)
    )
    return Schedule.of('breadth-first', placement, num_microbatches, orders)


FAMILY = Family(
    name='breadth-first',
    generate=breadth_first,
    summary='chunk by chunk through all microbatches, for FSDP',
    bubble='(p-1)(F+B+W)/v',
    memory='m',
    source='Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4',
    aliases=('LoopedBFS', 'ScheduleLoopedBFS', 'BFPP'),
    chunks=ANY,
    default_chunks=2,
    options=('num_chunks',),
)
