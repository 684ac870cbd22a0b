"""GIS: grouped interleaving, whose group size trades bubble for memory."""

from __future__ import annotations

from megatron_zbpp.ir import B, Placement, Schedule
from megatron_zbpp.schedules.construct.orders import defer_weights, even_groups
from megatron_zbpp.schedules.family import ANY, Family
from megatron_zbpp.schedules.interleaved import in_groups


def gis(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """GIS: interleaved 1F1B with the gradient sent before the weight gradient is computed.

    Wan et al., PipeOffload, arXiv 2503.01328: groups of g = p microbatches, W right after its B.

    - Bubble: (p-1)(F+B)/v.
    - Peak memory: ((v-1)g + p)/v activations: p where p divides m.
    - When: instead of `interleaved` where the backward can be split: less memory and less bubble.
      `zb-interleaved` has less bubble still in the same memory; what GIS has over it is that no W
      waits, which is simpler to offload and to account for.
    """
    return _grouped('gis', num_ranks, num_microbatches, num_chunks, size=num_ranks)


def gis_h(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """GIS-H: groups of half as many microbatches, for about half the memory.

    Wan et al., PipeOffload, arXiv 2503.01328: g = ceil(p/2), the smallest that does not starve.

    - Bubble: ((p-1)(F+B) + (p-g)(v-1)(F+B-W))/v where g divides m; less otherwise, as groups are
      made even and none smaller than g, for more memory.
    - Peak memory: ((v-1)g + p)/v activations, towards p/2 as v grows.
    - When: memory is short, messages are cheap and v is large: with v = 4 it has less bubble than
      `v-half` at about its memory, with v = 2 more of both.
    """
    return _grouped('gis-h', num_ranks, num_microbatches, num_chunks, size=(num_ranks + 1) // 2)


def _grouped(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, size: int
) -> Schedule:
    """Interleaved in groups of `size`, W right after B."""
    placement = Placement.loop(num_ranks, num_chunks)
    groups = even_groups(num_microbatches, size)
    orders = (
        defer_weights(in_groups(B, placement, rank, groups, num_ranks - 1 - rank), defer=0)
        for rank in range(num_ranks)
    )
    return Schedule.of(name, placement, num_microbatches, orders)


FAMILIES = (
    Family(
        name='gis',
        generate=gis,
        summary='interleaved with B sent before W, in the memory of 1F1B',
        bubble='(p-1)(F+B)/v',
        memory='p',
        source='PipeOffload, arXiv 2503.01328',
        aliases=('group-interleaved-1f1b', 'grouped-interleaving'),
        chunks=ANY,
        default_chunks=2,
        options=('num_chunks',),
    ),
    Family(
        name='gis-h',
        generate=gis_h,
        summary='interleaved in groups of half the size, towards half the memory',
        bubble='((p-1)(F+B) + (p-g)(v-1)(F+B-W))/v, g = ceil(p/2)',
        memory='(g(v-1) + p)/v',
        source='PipeOffload, arXiv 2503.01328',
        chunks=ANY,
        default_chunks=2,
        options=('num_chunks',),
    ),
)
