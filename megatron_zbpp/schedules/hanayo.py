"""Hanayo: waves over the ranks, down and up again."""

from __future__ import annotations

from megatron_zbpp.ir import BW, F, Pass, Placement, Schedule
from megatron_zbpp.schedules.construct.list_scheduling import list_schedule
from megatron_zbpp.schedules.registry import EVEN, Formula, family

# What a rank prefers of what is ready: kinds, and for each whether the last chunk comes first.
_PREFERENCES = (
    ((BW, False), (F, True)),
    ((F, True), (BW, False)),
    ((F, True), (BW, True)),
)


@family(
    'hanayo',
    summary='waves: 2W chunks a rank, down and up the ranks',
    bubble=Formula(
        'at most 4p(p-1)(F+B+W)/(3pv-2p+2) (F=B=W, m=p)',
        lambda at: 4 * at.p * (at.p - 1) * at.S / (3 * at.p * at.v - 2 * at.p + 2),
        lambda at: at.m == at.p and at.equal,
        at_most=True,
    ),
    memory=Formula('p', lambda at: min(at.p, at.m), at_most=True),
    source='Hanayo, arXiv 2308.15762',
    aliases=('wave',),
    chunks=EVEN,
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
    - Peak memory: p activations; at most m.
    - When: m is about p and the backward cannot be split. It sends 2W times the messages of 1F1B
      (measured by others: a gain on fast links, a loss on slow ones). Else `zb-v` beats it.
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
