"""STP: pairs of passes that hide tensor-parallel communication, on a V placement."""

from __future__ import annotations

from megatron_zbpp.ir import F, Pass, Phase, Placement, Schedule
from megatron_zbpp.schedules.construct.cells import joined
from megatron_zbpp.schedules.construct.phases import first_microbatches, phases
from megatron_zbpp.schedules.registry import TWO, Formula, family

_PAIRS = ' & '  # in labels of phases whose forwards run with the pass behind them


@family(
    'stp',
    summary='forwards paired with F, B or W, to overlap tensor parallelism, on a V placement',
    bubble=Formula(
        'F/2 (F=B=W, m >= 3p-1)',
        lambda at: at.F / 2,
        lambda at: at.equal and at.m >= 3 * at.p - 1,
    ),
    memory=Formula('2p - 1/2', lambda at: 2 * at.p - 0.5, lambda at: at.m >= 3 * at.p - 1),
    source='STP, arXiv 2510.27257',
    chunks=TWO,
    min_ranks=2,
)
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
    - When: tensor parallelism whose communication cannot be hidden within a pass, and a model that
      overlaps the pairs. Otherwise `zb-v` has the same makespan and half the memory.
    """
    p, m = num_ranks, num_microbatches
    whole = [_in_steps(p, max(m, 3 * p - 1), rank) for rank in range(p)]
    orders = [first_microbatches(found, m) for found in whole]
    schedule = Schedule.of('stp', Placement.v(p), m, orders)
    return joined(schedule, map(_pairs, whole)) if together else schedule


def _pairs(found: list[Phase]) -> list[tuple[Pass, Pass]]:
    pairs: list[tuple[Pass, Pass]] = []
    for label, passes in found:
        coming = iter(passes if _PAIRS in label else ())
        pairs += [(p, next(coming)) for p in coming if p.kind == F]
    return pairs


def _in_steps(p: int, m: int, rank: int) -> list[Phase]:
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
