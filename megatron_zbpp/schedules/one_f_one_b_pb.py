"""1F1B with twice the warm-up, which hides slow links: DAPPLE's second policy."""

from __future__ import annotations

from itertools import accumulate
from math import inf

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules.construct.orders import one_forward_one_backward
from megatron_zbpp.schedules.registry import Formula, family


@family(
    '1f1b-pb',
    summary='1F1B with about twice the warm-up: each message has a pass of time; more memory',
    bubble=Formula('(p-1)(F+B+W)', lambda at: (at.p - 1) * at.S),
    memory=Formula('2p-1, or the limit', lambda at: min(2 * at.p - 1, at.m)),
    source='DAPPLE, arXiv 2007.01045, section 3.2, warm-up policy B',
    aliases=('DAPPLE-PB', '1f1b-eager', 'eager-1f1b'),
)
def one_f_one_b_pb(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """1F1B with forwards run ahead for the messages, too: 2(p-s)-1 of them on rank s, not p-s.

    Fan et al., arXiv 2007.01045, count each link as a stage, so that a message is on its way
    while its sender works on another microbatch. Where links take no time it only holds more.

        >>> print(grid(one_f_one_b_pb(3, 6), width=76))
        rank 0   0F0   0F1   0F2   0F3   0F4   0BW0  0F5   0BW1  0BW2  0BW3  0BW4…
        rank 1   1F0   1F1   1F2   1BW0  1F3   1BW1  1F4   1BW2  1F5   1BW3  1BW4…
        rank 2   2F0   2BW0  2F1   2BW1  2F2   2BW2  2F3   2BW3  2F4   2BW4  2F5…

    - Bubble: (p-1)(F+B+W), and of messages far less than `1f1b` pays.
    - Peak memory: 2p-1 activations on rank 0, 2(p-s)-1 on rank s; at most m, and at most what
      `memory_limit` holds.
    - When: one chunk a rank on slow links, and the backward cannot be split.

    Args:
        num_ranks: p.
        num_microbatches: m.
        costs: activations of each stage, which a limit counts; default: 1 each.
        memory_limit: most that a rank may hold, in the unit of `costs.amounts`.
    """
    m = num_microbatches
    held = costs.amounts['activation'] if costs is not None else (1.0,) * num_ranks
    limit = inf if memory_limit is None else memory_limit
    flying = (
        in_flight(min(2 * (num_ranks - rank) - 1, m), rank, held[rank], limit)
        for rank in range(num_ranks)
    )
    # a rank that runs more before its first backward than the one before it would wait for ever
    orders = (
        one_forward_one_backward([rank], [m], ahead=most - 1)
        for rank, most in enumerate(accumulate(flying, min))
    )
    return Schedule.of('1f1b-pb', Placement.loop(num_ranks), m, orders)


def in_flight(wanted: int, rank: int, activation: float, limit: float) -> int:
    """Return how many microbatches a rank has in flight: those wanted, or what the limit holds.

    Raises:
        ValueError: the limit does not hold one.
    """
    room = int(limit / activation + 1e-9) if activation and limit < inf else wanted
    if room < 1:
        raise ValueError(
            f'memory limit {limit:g} does not hold one microbatch of rank {rank}, '
            f'{activation:g}: give more'
        )
    return min(wanted, room)
