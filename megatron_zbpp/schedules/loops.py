"""Several chunks a rank: interleaved 1F1B and its kin on a loop, and Hanayo's waves."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zbpp.ir import BW, F, Pass, Phase, Placement, Schedule
from megatron_zbpp.schedules.construct.draft import list_schedule
from megatron_zbpp.schedules.construct.phases import (
    Row,
    even_groups,
    gis_h_group,
    one_forward_one_backward,
    phases,
    split_one_forward_one_backward,
    zeropp_unit,
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


def breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Breadth-first: all forwards of chunk 0, then of chunk 1, ...; then backwards the other way.

    Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4. Within a chunk
    backwards come in ascending order of microbatches (torch's ScheduleLoopedBFS runs them in
    descending order), so that gradients add up to the same bits.

        >>> print(grid(breadth_first(2, 2)))
        rank 0   0F0   0F1   2F0   2F1   2BW0  2BW1  0BW0  0BW1
        rank 1   1F0   1F1   3F0   3F1   3BW0  3BW1  1BW0  1BW1

    - Bubble: (p-1)(F+B+W)/v for m >= p; below, (p-m)(v-1)(F+B+W)/v more.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    each = num_chunks * num_microbatches
    table = [(each, 'F', 'forwards'), (each, 'BW', 'backwards')]
    orders = (phases(placement.stages(rank), num_microbatches, table) for rank in range(num_ranks))
    return Schedule.of('breadth-first', placement, num_microbatches, orders)


def zb_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B with half its extra warm-up, and rank s deferring s weight gradients.

    What torch calls ScheduleInterleavedZeroBubble; section 2.3.1 of Zero Bubble (Qi et al., arXiv
    2401.10241) on the placement of interleaved 1F1B. Groups as in `interleaved`.

        >>> print(grid(zb_interleaved(2, 4), width=76))
        rank 0   0F0  0F1  2F0  2F1  2B0  2W0  0F2  2B1  2W1  0F3  0B0  0W0  2F2…
        rank 1   1F0  1F1  3F0  3B0  3F1  3B1  3W0  1F2  1B0  3W1  1F3  1B1  1W0…

    - Bubble: (p-1)(F+B-W)/v for m >= p, more below.
    - Peak memory: ((v-1)g + p)/v activations for groups of up to g: p where p divides m.
    """
    groups = even_groups(num_microbatches, num_ranks)
    return _grouped('zb-interleaved', num_ranks, num_chunks, groups, defers=True)


def gis(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """GIS: interleaved 1F1B with the gradient sent before the weight gradient is computed.

    Wan et al., PipeOffload, arXiv 2503.01328: groups of g = p microbatches, W right after its B.

        >>> print(grid(gis(2, 4), width=76))
        rank 0   0F0  0F1  2F0  2F1  2B0  2W0  0F2  2B1  2W1  0F3  0B0  0W0  2F2…
        rank 1   1F0  1F1  3F0  3B0  3W0  3F1  3B1  3W1  1F2  1B0  1W0  1F3  1B1…

    - Peak memory: ((v-1)g + p)/v activations: p where p divides m.
    """
    return _grouped('gis', num_ranks, num_chunks, even_groups(num_microbatches, num_ranks))


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
    """
    groups = even_groups(num_microbatches, gis_h_group(num_ranks))
    return _grouped('gis-h', num_ranks, num_chunks, groups)


def _grouped(
    name: str, num_ranks: int, num_chunks: int, groups: Sequence[int], defers: bool = False
) -> Schedule:
    """Return the order in groups of these sizes; `defers`: rank s defers s weight gradients."""
    placement = Placement.loop(num_ranks, num_chunks)
    orders = (
        split_one_forward_one_backward(
            placement.stages(rank), groups, num_ranks - 1 - rank, rank if defers else 0
        )
        for rank in range(num_ranks)
    )
    return Schedule.of(name, placement, sum(groups), orders)


def zeropp(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Units of about p microbatches: a block of F per chunk, a block of B per chunk, then Ws.

    Tang et al., ZeroPP, arXiv 2402.03791. What could be known of it is its abstract: F, B and W are
    split, and run blockwise over the chunks inside a unit of U microbatches, so that FSDP gathers
    the weights of a chunk once for each block and unit. The paper's order within a unit, its choice
    of U and its own formulas could not be obtained; what follows is this library's reading, and the
    formulas are its own. U = p, the fewest without waits between chunks (2p-2 for v = 1; units are
    made even as the groups of `interleaved`). On rank s, 2(p-1-s) Ws of each unit are kept for the
    next unit's wait between its last F and its first B.

        >>> print(grid(zeropp(2, 4), width=76))
        rank 0   0F0  0F1  2F0  2F1  2B0  2B1  0B0  0B1  2W0  2W1  0F2  0F3  2F2…
        rank 1   1F0  1F1  3F0  3F1  3B0  3B1  1B0  1B1  3W0  3W1  1W0  1W1  1F2…

    - Bubble: (p-1)(F+B)/v for F=B=W and m >= U, once and not once a unit.
    - Peak memory: U + 2(p-1)/v activations on rank 0 from the second unit on, where U divides m.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    units = even_groups(num_microbatches, zeropp_unit(num_ranks, num_chunks))
    orders = (
        _in_units(placement.stages(rank), units, keep=2 * (num_ranks - 1 - rank))
        for rank in range(num_ranks)
    )
    return Schedule.of('zeropp', placement, num_microbatches, orders)


def _in_units(stages: tuple[int, ...], units: list[int], keep: int) -> list[Phase]:
    """Return one rank's order: `keep` of a unit's Ws come after the forwards of the next."""
    table: list[Row] = []
    for number, size in enumerate(units):
        passes = len(stages) * size
        table += [
            (passes, 'F', f'unit {number}: F'),
            (keep, 'W', f'unit {number}: W kept from the one before'),
            (passes, 'B', f'unit {number}: B'),
            (passes - keep, 'W', f'unit {number}: W'),
        ]
    table.append((keep, 'W', 'W left'))
    return phases(stages, sum(units), table, units)


# What a rank prefers of what is ready: kinds, and for each whether the last chunk comes first.
_PREFERENCES = (
    ((BW, False), (F, True)),
    ((F, True), (BW, False)),
    ((F, True), (BW, True)),
)


def hanayo(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Hanayo: W waves, 2W chunks a rank; whatever is ready runs, within the memory of 1F1B.

    Liu et al., Hanayo, arXiv 2308.15762. The paper gives its order by pictures for m = p; here it
    is list scheduling with whichever of three orders of preference has the shortest makespan.

        >>> print(grid(hanayo(2, 3), width=76))
        rank 0   0F0   0F1   0F2   3F0   3BW0  3F1   3BW1  0BW0  3F2   3BW2  0BW1…
        rank 1   1F0   2F0   1F1   2F1   2BW0  1BW0  1F2   2F2   2BW1  1BW1  2BW2…

    - Bubble: at m = p and B+W = 2F never above the paper's ratio (2p-2)/(3pW+p-1), for p = 2..16
      and W = 1..3; about 2(p-1)/W. That ratio has no m in it, and for m > p no order could be found
      in the literature at hand: here the bubble stays about 2(p-1) at W = 1, and at W > 1 it grows
      with m (p=8, W=2: 7.5 at m=8, 13 at m=24, 22 at m=64, by when 1F1B has 21).
    """
    placement = Placement.wave(num_ranks, num_chunks)
    drafts = [
        list_schedule(
            placement,
            num_microbatches,
            [
                [
                    [Pass(kind, stage, i) for i in range(num_microbatches)]
                    for kind, last_first in preference
                    for stage in placement.stages(rank)[:: -1 if last_first else 1]
                ]
                for rank in range(num_ranks)
            ],
            memory_limit=num_ranks,
        )
        for preference in _PREFERENCES
    ]
    return min(drafts, key=lambda draft: draft.makespan).schedule('hanayo')
