"""PO-H and PO-F: PO with some or all of its activations on the host between F and B."""

from __future__ import annotations

from dataclasses import replace

from megatron_zbpp.ir import B, F, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, TRANSFERS
from megatron_zbpp.techniques.offload.place import with_offload
from megatron_zbpp.techniques.slices.place import in_slices


def po_h(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    costs: Costs | None = None,
    num_slices: int = 1,
) -> Schedule:
    """PO-H: PO, and of each rank's chunks the first half goes to the host between F and B.

    Wan et al., PipeOffload, arXiv 2503.01328: chunks live the longer the earlier they
    are, so half of them hold three quarters of the memory.

        >>> print(grid(po_h(2, 4), width=76))
        rank 0   0F0  0O0  2F0  0L0  0F1  2B0  2W0  0O1  2F1  0B0  0W0  0L1  0F2…
        rank 1   1F0  3F0  3B0  3W0  1F1  1B0  1W0  3F1  3B1  3W1  1F2  1B1  1W1…

    - Bubble: as PO's, and more where the copies take longer than planned.
    - Peak memory: about (v+2)/(8v) of p activations, and what is in transit.
    """
    base = in_slices(
        'po', num_ranks, num_microbatches, num_slices, num_chunks=num_chunks, costs=costs
    )
    return _offloaded('po-h', base, (num_chunks + 1) // 2, costs)


def po_f(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    costs: Costs | None = None,
    num_slices: int = 1,
) -> Schedule:
    """PO-F: PO, and all that has the time goes to the host between F and B.

    Wan et al., PipeOffload, arXiv 2503.01328.

        >>> print(grid(po_f(2, 4), width=76))
        rank 0   0F0  0O0  2F0  0L0  0F1  2B0  2W0  0O1  2F1  0B0  0W0  0L1  0F2…
        rank 1   1F0  3F0  3B0  3W0  1F1  1B0  1W0  3F1  3B1  3W1  1F2  1B1  1W1…

    - Bubble: as PO's, and more where the copies take longer than planned.
    - Peak memory: about 4 activations of a chunk, however many ranks there are.
    """
    base = in_slices(
        'po', num_ranks, num_microbatches, num_slices, num_chunks=num_chunks, costs=costs
    )
    return _offloaded('po-f', base, num_chunks, costs)


def _offloaded(name: str, base: Schedule, moved: int, costs: Costs | None) -> Schedule:
    """Return PO with each rank's first `moved` chunks on the host, in slots as long as any copy."""
    ones = (1.0,) * base.placement.num_stages
    costs = costs or Costs.of(ones, ones, ones)
    told = [time for kind in TRANSFERS[HOST] for time in costs.times.get(kind, ())]
    works = zip(costs.times[F], costs.times[B], costs.times[W], strict=True)
    slot = max(told) if told else max(map(sum, works)) / 2
    costs = costs.with_times(**dict.fromkeys(TRANSFERS[HOST], (slot,) * len(ones)))
    stages = [s for s in range(base.num_stages) if base.placement.chunk_of(s) < moved]
    return replace(with_offload(base, stages, costs), name=name)
