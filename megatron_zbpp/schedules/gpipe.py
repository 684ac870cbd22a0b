"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from megatron_zbpp.ir import BW, F, Pass, Placement, Schedule
from megatron_zbpp.schedules.family import Family


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe: every rank runs all its forwards, then all its backwards.

    Huang et al., GPipe, arXiv 1811.06965, section 2.3. The paper runs backwards in reverse order of
    microbatches and recomputes activations; here backwards come in ascending order, as in every
    schedule of this library, so that gradients add up to the same bits, and nothing is recomputed.
    Bubble and peak memory are the same in either order.

    - Bubble: (p-1)(F+B+W), as 1F1B's.
    - Peak memory: m activations on every rank.
    - When: as a baseline, or with very few microbatches. `1f1b` takes the same time in less memory.
    """
    m = num_microbatches
    orders = (
        [Pass(kind, rank, i) for kind in (F, BW) for i in range(m)] for rank in range(num_ranks)
    )
    return Schedule.of('gpipe', Placement.loop(num_ranks), m, orders)


FAMILY = Family(
    name='gpipe',
    generate=gpipe,
    summary='all forwards, then all backwards',
    bubble='(p-1)(F+B+W)',
    memory='m',
    source='GPipe, arXiv 1811.06965, section 2.3',
    aliases=('ScheduleGPipe', 'FThenB', 'AFAB', 'all-forward-all-backward'),
)
