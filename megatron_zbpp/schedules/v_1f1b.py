"""1F1B-V: less memory than 1F1B without splitting the backward, on a V placement."""

from __future__ import annotations

from megatron_zbpp.ir import BW, F, Placement, Schedule
from megatron_zbpp.schedules.construct.building_blocks import orders, repeat, tighten
from megatron_zbpp.schedules.registry import TWO, Formula, family

_INTERVAL = 6  # slots from one microbatch to the next: F and BW (two slots) of two chunks


@family(
    '1f1b-v',
    summary='1F1B on a V placement: less memory without the B/W split',
    bubble=Formula(
        'at most (5p-5)F/2 (F=B=W)',
        lambda at: 5 * (at.p - 1) / 2 * at.F,
        lambda at: at.m >= 2 * at.p and at.equal,
        at_most=True,
    ),
    memory=Formula('floor(2p/3)+1', lambda at: min(2 * at.p // 3 + 1, at.m)),
    source='Controllable Memory, arXiv 2405.15362, appendix',
    aliases=('v-1f1b',),
    chunks=TWO,
    min_ranks=2,
)
def v_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B-V: 1F1B on a V placement, its stages' long and short activation lifetimes paired.

    Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, appendix: a building
    block without the B/W split.

        >>> print(grid(v_1f1b(3, 4), width=76))
        rank 0   0F0   0F1   0F2   0F3   5F0   5BW0  5F1   5BW1  5F2   5BW2  5F3…
        rank 1   1F0   1F1   1F2   4F0   1F3   4F1   4BW0  4F2   4BW1  1BW0  4F3…
        rank 2   2F0   3F0   2F1   3F1   2F2   3F2   3BW0  2BW0  2F3   3F3   3BW1…

    - Bubble where F=B=W, m >= 2p: (5p-5)/2 for p = 1 mod 3, else at most (5p-7)/2, 2 at p = 2
      (1F1B: 3p-3).
    - Peak memory: floor(2p/3)+1 activations, at most m. The claimed 2/3 of 1F1B's is approached as
      p grows and met nowhere: 3 of 4 at p = 4, 6 of 8 at p = 8, 11 of 16 at p = 16.
    - When: the backward cannot be split, and memory counts. Else `v-half` has less of both.
    """
    p = num_ranks
    placement = Placement.v(p)
    slots = repeat(_block(p), _INTERVAL, num_microbatches)
    slots = tighten(slots, placement, limit=2 * (2 * p // 3 + 1))
    return Schedule.of('1f1b-v', placement, num_microbatches, orders(slots, placement))


def _block(p: int) -> dict[tuple[str, int], int]:
    """Place forwards slot after slot, each backward as early as the interval has room for it."""
    block = {(F, stage): stage for stage in range(2 * p)}
    ready, other = 2 * p, {}
    for rank in range(p):
        places = _places(rank, 2 * p - 1 - rank)
        first, other[rank] = sorted(places, key=lambda place: (place - ready) % _INTERVAL)
        block[BW, 2 * p - 1 - rank] = ready + (first - ready) % _INTERVAL
        ready = block[BW, 2 * p - 1 - rank] + 2
    for rank in reversed(range(p)):
        block[BW, rank] = ready + (other[rank] - ready) % _INTERVAL
        ready = block[BW, rank] + 2
    return block


def _places(*forwards: int) -> tuple[int, int]:
    """Return slots, modulo the interval, where both backwards fit around these forwards."""
    taken = {slot % _INTERVAL for slot in forwards}
    free = [at for at in range(_INTERVAL) if at not in taken and (at + 1) % _INTERVAL not in taken]
    return next((a, b) for a in free for b in free if (b - a) % _INTERVAL in (2, 3))
