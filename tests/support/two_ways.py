"""A schedule whose microbatches run against each other, as a family of one's own."""

from megatron_zbpp.ir import BW, F, Pass, Placement, Schedule
from megatron_zbpp.schedules import family


@family('two-ways')
def two_ways(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return one for 2 ranks: each runs stage 0 of every other microbatch, and stage 1 of the rest.

    Two microbatches at a time: each rank has both forwards, then both backwards.
    """
    assert num_ranks == 2, 'made for two'
    orders: list[list[Pass]] = [[], []]
    for first in range(0, num_microbatches, 2):
        pair = range(first, min(first + 2, num_microbatches))
        for rank, order in enumerate(orders):
            begun = [Pass(F, 0, m) for m in pair if m % 2 == rank]
            passed = [Pass(F, 1, m) for m in pair if m % 2 != rank]
            forwards = begun + passed
            order += forwards + [Pass(BW, p.stage, p.microbatch) for p in reversed(forwards)]
    return Schedule.of('two-ways', Placement.two_way(2), num_microbatches, orders)
