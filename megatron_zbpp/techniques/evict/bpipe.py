"""BPipe: 1F1B whose first ranks keep some activations on the last ones, which have room."""

from __future__ import annotations

from dataclasses import replace

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.evict.place import with_eviction
from megatron_zbpp.techniques.slices.place import in_slices


def bound(num_ranks: int, num_slices: int = 1) -> float:
    """Return the most activations on any rank: ceil((p+2)/2), and n-1 further slices of n."""
    return ((num_ranks + 3) // 2 + num_slices - 1) / num_slices


def b_pipe(num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """BPipe: of pairs (x, p-1-x) the first sends activations to the second, and takes them back.

    Kim et al., BPipe: Memory-Balanced Pipeline Parallelism, ICML 2023. Which microbatches go is a
    search of our own for the fewest: each leaves beside the pass behind its F, and comes back
    beside the pass before its B. (Whether it pays: arXiv 2401.02088.)

        >>> print(grid(b_pipe(4, 4), width=76))
        rank 0   0F0   0F1   0F2   0E1   0F3   0E2   0K1   0BW0  0K2   0BW1  0BW2…
        rank 1   1F0   1F1   1F2   1BW0  1F3   1BW1  1BW2  1BW3
        rank 2   2F0   2F1   2BW0  2F2   2BW1  2F3   2BW2  2BW3
        rank 3   3F0   3BW0  3F1   3BW1  3F2   3BW2  3F3   3BW3

    - Peak memory: ceil((p+2)/2) activations on every rank, what it stores for its partner included.
    """
    plain = in_slices('1f1b', num_ranks, num_microbatches, num_slices)
    limits = [bound(num_ranks, num_slices)] * num_ranks
    found = with_eviction(plain, range(num_ranks), Costs.uniform(plain.placement), limits)
    return replace(found, name='bpipe', phases=())
