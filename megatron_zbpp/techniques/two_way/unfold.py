"""Two-way schedules of D = 2P ranks from schedules of a V on P ranks.

Rank r of the V becomes ranks r and D-1-r, which both hold its two stages. A microbatch goes down on
the one half and on, where the V would turn, on the other half: the double cover of the V.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_zbpp.ir import Pass, Placement, Schedule, Together


def unfolded(name: str, schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return a schedule of a V as one of both ways, in which each way takes every other microbatch.

    Args:
        name: of the result.
        schedule: of a V, for at least half of the microbatches, rounded up.
        num_microbatches: of both ways together; what the last ones would be is left out.

    Raises:
        ValueError: it is not of a V.
    """
    half = schedule.num_ranks
    if schedule.placement != Placement.v(half):
        raise ValueError(
            f'{schedule.name} cannot be unfolded because its stages are not in a V: take one such '
            'as zb-v'
        )

    def on(rank: int, p: Pass) -> Pass:
        first_half, before_turn = rank < half, p.stage < half
        return p._replace(microbatch=2 * p.microbatch + (first_half != before_turn))

    def order(rank: int) -> Iterable[Pass | Together]:
        for entry in schedule.order(min(rank, 2 * half - 1 - rank)):
            passes = entry.passes if isinstance(entry, Together) else (entry,)
            kept = tuple(q for p in passes if (q := on(rank, p)).microbatch < num_microbatches)
            yield from kept if len(kept) < 2 else (Together(kept),)

    placement = Placement.two_way(2 * half)
    return Schedule.of(name, placement, num_microbatches, map(order, range(2 * half)))
