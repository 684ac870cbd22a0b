"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules.construct.phases import phases
from megatron_zbpp.schedules.registry import Formula, family


@family(
    'gpipe',
    summary='all forwards, then all backwards',
    bubble=Formula('(p-1)(F+B+W)', lambda at: (at.p - 1) * at.S),
    memory=Formula('m', lambda at: at.m),
    source='GPipe, arXiv 1811.06965, section 2.3',
    aliases=('ScheduleGPipe', 'FThenB', 'AFAB', 'all-forward-all-backward'),
)
def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe: every rank runs all its forwards, then all its backwards.

    Huang et al., GPipe, arXiv 1811.06965, section 2.3. The paper runs backwards in reverse order of
    microbatches and recomputes activations; here backwards come in ascending order, as in every
    schedule of this library, so that gradients add up to the same bits, and nothing is recomputed.
    Bubble and peak memory are the same in either order.

        >>> print(grid(gpipe(2, 3)))
        rank 0   0F0   0F1   0F2   0BW0  0BW1  0BW2
        rank 1   1F0   1F1   1F2   1BW0  1BW1  1BW2

    - Bubble: (p-1)(F+B+W), as 1F1B's.
    - Peak memory: m activations on every rank.
    - When: as a baseline, or with very few microbatches. `1f1b` takes the same time in less memory.
    """
    m = num_microbatches
    table = [(m, 'F', 'forwards'), (m, 'BW', 'backwards')]
    orders = (phases([rank], m, table) for rank in range(num_ranks))
    return Schedule.of('gpipe', Placement.loop(num_ranks), m, orders)
