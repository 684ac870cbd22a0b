"""Orders by list scheduling, which fills the waits of a rank: 2BP and Hanayo."""

from __future__ import annotations

from megatron_zbpp.ir import BW, F, Pass, Placement, Schedule
from megatron_zbpp.schedules.construct.draft import list_schedule
from megatron_zbpp.schedules.construct.phases import phases


def two_bp(num_ranks: int, num_microbatches: int) -> Schedule:
    """2BP on GPipe: no rank waits for the weight gradients of another.

    Rae et al., 2BP: 2-Stage Backpropagation, arXiv 2405.18047: backward-p1 is B, backward-p2 is W.
    The paper concatenates the microbatches of all backward-p2; here they stay one pass each, so
    that gradients add up to the same bits.

        >>> print(grid(two_bp(2, 3)))
        rank 0   0F0  0F1  0F2  0B0  0B1  0B2  0W0  0W1  0W2
        rank 1   1F0  1F1  1F2  1B0  1B1  1B2  1W0  1W1  1W2

    - Bubble: (p-1)(F+B), two thirds of GPipe's where F=B=W.
    """
    m = num_microbatches
    table = [(m, 'F', 'forwards'), (m, 'B', 'input gradients'), (m, 'W', 'weight gradients')]
    orders = (phases([rank], m, table) for rank in range(num_ranks))
    return Schedule.of('2bp', Placement.loop(num_ranks), m, orders)


def two_bp_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """2BP on 1F1B: F and B as in 1F1B, W where a rank would wait, and what is left at the end.

    Rae et al., 2BP, arXiv 2405.18047: 1F1B-1 is m = p, 1F1B-2 is m = 2p.

        >>> print(grid(two_bp_1f1b(3, 4), width=76))
        rank 0   0F0  0F1  0F2  0B0  0F3  0B1  0W0  0B2  0W1  0B3  0W2  0W3
        rank 1   1F0  1F1  1B0  1F2  1B1  1F3  1B2  1W0  1B3  1W1  1W2  1W3
        rank 2   2F0  2B0  2F1  2B1  2F2  2B2  2F3  2B3  2W0  2W1  2W2  2W3

    - Bubble: (p-1)(F+B-W) for m >= p, as ZB-H1's, which needs 2p-1.
    - Peak memory: m activations on the last rank, whose W all come at the end.
    """
    p, m = num_ranks, num_microbatches
    placement = Placement.loop(p)
    tables = ([(p - 1 - rank, 'F', ''), (m, 'F B', ''), (m, 'W', '')] for rank in range(p))
    orders = [phases([rank], m, table)[:-1] for rank, table in enumerate(tables)]
    lanes = [[[each for phase in order for each in phase.passes]] for order in orders]
    return list_schedule(placement, m, lanes).schedule('2bp-1f1b')


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
                _lanes(placement.stages(rank), num_microbatches, preference)
                for rank in range(num_ranks)
            ],
            memory_limit=num_ranks,
        )
        for preference in _PREFERENCES
    ]
    return min(drafts, key=lambda draft: draft.makespan).schedule('hanayo')


def _lanes(
    stages: tuple[int, ...], num_microbatches: int, preference: tuple[tuple[str, bool], ...]
) -> list[list[Pass]]:
    """Return a lane for each kind and stage of a rank."""
    return [
        [Pass(kind, stage, i) for i in range(num_microbatches)]
        for kind, last_first in preference
        for stage in (reversed(stages) if last_first else stages)
    ]
