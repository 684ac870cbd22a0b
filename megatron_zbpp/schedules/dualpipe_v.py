"""DualPipeV: DualPipe cut in half, on a V placement."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from megatron_zbpp.ir import BW, F, Pass, Phase, Placement, Schedule
from megatron_zbpp.schedules.construct.cells import joined
from megatron_zbpp.schedules.construct.phases import first_microbatches, phases
from megatron_zbpp.schedules.registry import TWO, Formula, family


@family(
    'dualpipe-v',
    summary='forwards and backwards paired to overlap expert parallelism, on a V placement',
    bubble=Formula(
        '(p-1)F/2 (F=B=W)',
        lambda at: (at.p - 1) * at.F / 2,
        lambda at: at.m >= 2 * at.p and at.equal,
    ),
    memory=Formula('p + 1/2', lambda at: min(at.p + 0.5, at.m), lambda at: at.m >= 2 * at.p),
    source='DualPipe, github.com/deepseek-ai/DualPipe; DeepSeek-V3, arXiv 2412.19437',
    aliases=('ScheduleDualPipeV',),
    chunks=TWO,
    min_ranks=2,
)
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
    - Peak memory: p + 1/2 activations; at most m.
    - When: with expert parallelism and a model that overlaps the pairs. Otherwise `zb-v` has the
      same makespan, no bubble in its windows and less memory (some unequal times excepted: with a
      heavy last stage this order happens to lose little).
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
