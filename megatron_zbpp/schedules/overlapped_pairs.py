"""Pairs of passes that hide communication, on a V placement: DualPipeV and STP."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from megatron_zbpp.ir import BW, F, Pass, Phase, Placement, Schedule
from megatron_zbpp.schedules.construct.phases import first_microbatches, phases


def joined(schedule: Schedule, pairs: Iterable[Iterable[tuple[Pass, Pass]]]) -> Schedule:
    """Return a schedule whose ranks run these pairs as one, where they follow each other.

    Args:
        schedule: the order.
        pairs: of each rank, those that it has.
    """
    cells = set(itertools.chain.from_iterable(pairs))
    found = (
        (rank, at)
        for rank, order in enumerate(schedule.passes)
        for at, pair in enumerate(itertools.pairwise(order))
        if pair in cells
    )
    return replace(schedule, together=frozenset(found))


def dualpipe_v(num_ranks: int, num_microbatches: int, together: bool = False) -> Schedule:
    """DualPipeV: forwards and backwards of opposite directions paired, one direction per chunk.

    DeepSeek's DualPipe (DeepSeek-V3, arXiv 2412.19437) cut in half by Sea AI Lab: the same without
    a second copy of the weights. A pair is here F, then BW. With `together` it is one cell, which
    starts when both inputs are there: Megatron runs it at once where
    `overlap_moe_expert_parallel_comm` is set, to hide the experts' all-to-all. With m < 2p it is
    the order of 2p without the missing microbatches.

        >>> print(grid(dualpipe_v(2, 4), width=76))
        rank 0   0F0   0F1   0F2   3F0   3B0   3W0   3F1   0F3   3BW1  3F2   0BW0…
        rank 1   1F0   2F0   1F1   2F1   1F2   2BW0  2F2   1BW0  1F3   2BW1  2F3…

    - Bubble where F=B=W, m >= 2p: (p-1)/2, whatever m is. The published formula comes to p-1: that
      is what a pair costs that starts when both its inputs are there, which this F does not await.
    """
    p, m = num_ranks, num_microbatches
    whole = [_in_steps(p, max(m, 2 * p), rank) for rank in range(p)]
    orders = [first_microbatches(found, m) for found in whole]
    schedule = Schedule.of('dualpipe-v', Placement.v(p), m, orders)
    return joined(schedule, map(_pairs, whole)) if together else schedule


def _pairs(found: Iterable[Phase]) -> list[tuple[Pass, Pass]]:
    return [
        (first, second)
        for _, passes in found
        for first, second in itertools.pairwise(passes)
        if (first.kind, second.kind) == (F, BW)
    ]


def _in_steps(p: int, m: int, rank: int) -> list[Phase]:
    """Return one rank's order for m >= 2p, in the eight steps of DualPipe."""
    below = p - 1 - rank  # ranks further down the V
    last = ['1', '0'] * (rank + 1)  # the first half of these is fused, the second split
    fused = ' '.join(f'BW{chunk}' for chunk in last[: rank + 1])
    split = ' '.join(f'B{chunk}' for chunk in last[rank + 1 :])
    table = [
        (2 * below, 'F0', 'step 1: F0'),
        (rank + 1, 'F0 F1', 'step 2: F0 F1'),
        (below, 'B1 W F1', 'step 3: B1 W1 F1'),
        (m - 2 * p + rank + 1, 'F0 BW1 F1 BW0', 'step 4: F0 & BW1, F1 & BW0'),
        (below, 'BW1 F1 BW0', 'step 5: BW1, F1 & BW0'),
        (1, fused, 'step 6: whole backwards'),
        (1, split, 'step 6: B without W'),
        (below, 'W B0', 'step 7: W B0'),
        (2 * m, 'W', 'step 8: W left'),
    ]
    return phases([rank, 2 * p - 1 - rank], m, table)


_PAIRS = ' & '  # in labels of phases whose forwards run with the pass behind them


def stp(num_ranks: int, num_microbatches: int, together: bool = False) -> Schedule:
    """STP: while one pass of a pair waits for its all-reduce, the other computes.

    Synergistic tensor and pipeline parallelism, arXiv 2510.27257. Pairs are F & F, F & B and F & W;
    with `together` each is one cell. Where a W of the stage waits, a whole backward is B and that
    W: so weight gradients come in microbatch order. With m < 3p-1 it is the order of 3p-1 without
    the missing microbatches.

        >>> print(grid(stp(2, 5), width=76))
        rank 0   0F0   0F1   0F2   3F0   0F3   3F1   3B0   0F4   3W0   3F2   3BW1…
        rank 1   1F0   2F0   1F1   2F1   1F2   1F3   2F2   2BW0  1F4   1BW0  2F3…

    - Bubble where F=B=W, m >= 3p-1: F/2 in the windows; cells wait for both inputs: (p-1)F/2. The
      makespan is that of `zb-v` either way.
    - Peak memory: 2p - 1/2 activations, on the last rank; (3p+1)/2 on the first.
    """
    p, m = num_ranks, num_microbatches
    whole = [_stp_steps(p, max(m, 3 * p - 1), rank) for rank in range(p)]
    orders = [first_microbatches(found, m) for found in whole]
    schedule = Schedule.of('stp', Placement.v(p), m, orders)
    return joined(schedule, map(_stp_pairs, whole)) if together else schedule


def _stp_pairs(found: list[Phase]) -> list[tuple[Pass, Pass]]:
    pairs: list[tuple[Pass, Pass]] = []
    for label, passes in found:
        coming = iter(passes if _PAIRS in label else ())
        pairs += [(p, next(coming)) for p in coming if p.kind == F]
    return pairs


def _stp_steps(p: int, m: int, rank: int) -> list[Phase]:
    """Return one rank's order for m >= 3p-1, in the nine steps of STP."""
    below, steady = p - 1 - rank, 2 * (m - 3 * p + 1) + 1 + 2 * rank
    kinds = ['BW'] * (steady - rank) + ['B'] * rank
    alternating = [f'F{1 - at % 2} {kind}{1 - at % 2}' for at, kind in enumerate(kinds)]
    table = [
        (2 * below, 'F0', 'step 1: F0'),
        (rank + 1, 'F0 F1', 'step 2: F0 F1'),
        ((rank + 1) % 2, 'F0', 'step 3: F0'),
        ((rank + 1) // 2, 'F0 F0', 'step 3: F0 & F0'),
        (below, 'F1 B1 F0 W1', 'step 4: F1 & B1, F0 & W1'),
        (1, ' '.join(alternating), 'step 5: F1 & BW1, F0 & BW0'),
        (2 * p - 2 - rank, 'B0 W0 F1 B1', 'step 6: B0 W0, F1 & B1'),
        (rank + 1, 'B0 W0 B1 W1', 'step 7: B0 W0 B1 W1'),
        (below, 'B0 W0 W1 W1', 'step 8: B0 W0 W1 W1'),
        (1, 'B0 W0', 'step 8: B0 W0'),
        (2 * m, 'W1 W0', 'step 9: W left'),
    ]
    return phases([rank, 2 * p - 1 - rank], m, table)
