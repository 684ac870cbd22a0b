"""SlimPipe: slices of sequences, interleaved, with the output layer on all ranks."""

from __future__ import annotations

from dataclasses import replace

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.slices.seq1f1b import SLICES, seq1f1b_interleaved
from megatron_zbpp.techniques.vocabulary.graph import S, T
from megatron_zbpp.techniques.vocabulary.place import in_shards, with_shards


def slimpipe(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    costs: Costs | None = None,
    num_slices: int = SLICES,
) -> Schedule:
    """SlimPipe: interleaved 1F1B whose unit is an equal slice, with shards of the output layer.

    Li et al., SlimPipe, arXiv 2504.14519. S and T are of a slice, too, as in Vocabulary Parallelism
    (arXiv 2411.05288). The paper's n is a multiple of p: then a group of n units is one microbatch.

        >>> print(grid(slimpipe(2, 2, num_slices=2), width=76))
        rank 0   0F0     0F0.1   2F0     2F0.1   4S0     0F1     4S0.1   0F1.1…
        rank 1   1F0     1F0.1   3F0     5S0     3F0.1   5S0.1   1F1     3BW0.1…

    - Bubble: at most (p-1)(F+B+W)/(nv) for mn >= p, where slices take equal times; attention makes
      later ones longer, which context exchange evens out (simulated only).
    - Peak memory: at most 1 + (2p-2+v)/(nv) activations for n >= p, beside keys, values and logits.
    """
    host = seq1f1b_interleaved(num_ranks, num_microbatches, num_chunks, num_slices)
    known = costs is not None and {S, T} <= costs.times.keys()
    made = in_shards(host, costs) if known and costs is not None else with_shards(host)
    return replace(made, name='slimpipe')
