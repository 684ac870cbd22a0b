"""GIS: grouped interleaving, whose group size trades bubble for memory."""

from __future__ import annotations

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules.construct.groups import even_groups
from megatron_zbpp.schedules.construct.orders import split_one_forward_one_backward
from megatron_zbpp.schedules.registry import Formula, Sizes, family


def _half(num_ranks: int) -> int:
    """Return G of GIS-H."""
    return (num_ranks + 1) // 2


def _peak(at: Sizes, size: int) -> float:
    """Return ((v-1)g + p)/v, where g is the largest of even groups of at least `size`."""
    return ((at.v - 1) * even_groups(at.m, size)[0] + at.p) / at.v


def _halved_bubble(at: Sizes) -> float:
    """Return the bubble of GIS-H, where its groups are of g."""
    short = (at.p - _half(at.p)) * (at.v - 1) * (at.F + at.B - at.W)
    return ((at.p - 1) * (at.F + at.B) + short) / at.v


@family(
    'gis',
    summary='interleaved with B sent before W, in the memory of 1F1B',
    bubble=Formula(
        '(p-1)(F+B)/v',
        lambda at: (at.p - 1) * (at.F + at.B) / at.v,
        lambda at: at.m >= at.p and at.equal,
    ),
    memory=Formula('p', lambda at: _peak(at, at.p), lambda at: at.m >= at.p),
    source='PipeOffload, arXiv 2503.01328',
    aliases=('group-interleaved-1f1b', 'grouped-interleaving'),
)
def gis(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """GIS: interleaved 1F1B with the gradient sent before the weight gradient is computed.

    Wan et al., PipeOffload, arXiv 2503.01328: groups of g = p microbatches, W right after its B.

        >>> print(grid(gis(2, 4), width=76))
        rank 0   0F0  0F1  2F0  2F1  2B0  2W0  0F2  2B1  2W1  0F3  0B0  0W0  2F2…
        rank 1   1F0  1F1  3F0  3B0  3W0  3F1  3B1  3W1  1F2  1B0  1W0  1F3  1B1…

    - Bubble: (p-1)(F+B)/v.
    - Peak memory: ((v-1)g + p)/v activations: p where p divides m.
    - When: instead of `interleaved` where the backward can be split: less memory and less bubble.
      `zb-interleaved` has less bubble still in the same memory; what GIS has over it is that no W
      waits, which is simpler to offload and to account for.
    """
    return _grouped('gis', num_ranks, num_microbatches, num_chunks, size=num_ranks)


@family(
    'gis-h',
    summary='interleaved in groups of half the size, towards half the memory',
    bubble=Formula(
        '((p-1)(F+B) + (p-g)(v-1)(F+B-W))/v, g = ceil(p/2)',
        _halved_bubble,
        lambda at: at.m >= at.p and at.m % _half(at.p) == 0 and at.equal,
    ),
    memory=Formula('(g(v-1) + p)/v', lambda at: _peak(at, _half(at.p)), lambda at: at.m >= at.p),
    source='PipeOffload, arXiv 2503.01328',
)
def gis_h(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """GIS-H: groups of half as many microbatches, for about half the memory.

    Wan et al., PipeOffload, arXiv 2503.01328: g = ceil(p/2), the smallest that does not starve.

        >>> print(grid(gis_h(4, 4), width=76))
        rank 0   0F0  0F1  4F0  4F1  0F2  0F3  4B0  4W0  4F2  4B1  4W1  4F3  0B0…
        rank 1   1F0  1F1  5F0  5F1  1F2  5B0  5W0  1F3  5B1  5W1  5F2  1B0  1W0…
        rank 2   2F0  2F1  6F0  6F1  6B0  6W0  2F2  6B1  6W1  2F3  2B0  2W0  6F2…
        rank 3   3F0  3F1  7F0  7B0  7W0  7F1  7B1  7W1  3F2  3B0  3W0  3F3  3B1…

    - Bubble: ((p-1)(F+B) + (p-g)(v-1)(F+B-W))/v where g divides m; less otherwise, as groups are
      made even and none smaller than g, for more memory.
    - Peak memory: ((v-1)g + p)/v activations, towards p/2 as v grows.
    - When: memory is short, messages are cheap and v is large: with v = 4 it has less bubble than
      `v-half` at about its memory, with v = 2 more of both.
    """
    return _grouped('gis-h', num_ranks, num_microbatches, num_chunks, size=_half(num_ranks))


def _grouped(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, size: int
) -> Schedule:
    placement = Placement.loop(num_ranks, num_chunks)
    groups = even_groups(num_microbatches, size)
    orders = (
        split_one_forward_one_backward(
            placement.stages(rank), groups, ahead=num_ranks - 1 - rank, defer=0
        )
        for rank in range(num_ranks)
    )
    return Schedule.of(name, placement, num_microbatches, orders)
