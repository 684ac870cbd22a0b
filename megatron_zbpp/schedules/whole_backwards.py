"""Whole backwards, one stage a rank: GPipe, 1F1B, and 1F1B for slow links."""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from math import inf

from megatron_zbpp.ir import Phase, Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules.construct.phases import one_forward_one_backward, phases


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe: every rank runs all its forwards, then all its backwards.

    Huang et al., GPipe, arXiv 1811.06965, section 2.3. The paper runs backwards in reverse order of
    microbatches and recomputes activations; here backwards come in ascending order, as in every
    schedule of this library, so that gradients add up to the same bits, and nothing is recomputed.
    Bubble and peak memory are the same in either order.

        >>> print(grid(gpipe(2, 3)))
        rank 0   0F0   0F1   0F2   0BW0  0BW1  0BW2
        rank 1   1F0   1F1   1F2   1BW0  1BW1  1BW2
    """
    m = num_microbatches
    table = [(m, 'F', 'forwards'), (m, 'BW', 'backwards')]
    orders = (phases([rank], m, table) for rank in range(num_ranks))
    return Schedule.of('gpipe', Placement.loop(num_ranks), m, orders)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: each rank runs just enough forwards to feed its successors, then F and BW by turns.

    The same order goes by PipeDream-Flush (Narayanan et al., arXiv 2006.09503, section 3.2) and by
    DAPPLE's early backward (Fan et al., arXiv 2007.01045). Megatron's own schedule without chunks.

        >>> print(grid(one_f_one_b(4, 6), width=76))
        rank 0   0F0   0F1   0F2   0F3   0BW0  0F4   0BW1  0F5   0BW2  0BW3  0BW4…
        rank 1   1F0   1F1   1F2   1BW0  1F3   1BW1  1F4   1BW2  1F5   1BW3  1BW4…
        rank 2   2F0   2F1   2BW0  2F2   2BW1  2F3   2BW2  2F4   2BW3  2F5   2BW4…
        rank 3   3F0   3BW0  3F1   3BW1  3F2   3BW2  3F3   3BW3  3F4   3BW4  3F5…

    - Peak memory: p activations on rank 0, p-s on rank s; at most m.
    """
    m = num_microbatches
    orders = (
        one_forward_one_backward([rank], [m], ahead=num_ranks - 1 - rank)
        for rank in range(num_ranks)
    )
    return Schedule.of('1f1b', Placement.loop(num_ranks), m, orders)


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
    """Return how many microbatches a rank has in flight: those wanted, or what the limit holds."""
    room = int(limit / activation + 1e-9) if activation and limit < inf else wanted
    if room < 1:
        raise ValueError(
            f'memory limit {limit:g} does not hold one microbatch of rank {rank}, '
            f'{activation:g}: give more'
        )
    return min(wanted, room)


_USUAL = 2  # k, where no times tell a better one


def kfkb(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """kFkB: 1F1B of groups of k microbatches, whose messages hide behind the group's other passes.

    Wang et al., Ada-Grouper, arXiv 2303.01675, for networks that are shared. With k = 1 it is 1F1B,
    with k = m GPipe. With `costs` k is the one of 1, 2, 4, ... whose makespan is shortest within
    `memory_limit`, and the least of equal ones; without costs, 2, or 1 where 2 does not fit. Where
    not even 1F1B fits, ranks run as many forwards ahead as do.
    The paper halves microbatches as it doubles k; here they stay what the job says.

        >>> print(grid(kfkb(3, 5), width=76))
        rank 0   0F0   0F1   0F2   0F3   0F4   0BW0  0BW1  0BW2  0BW3  0BW4
        rank 1   1F0   1F1   1F2   1F3   1BW0  1BW1  1F4   1BW2  1BW3  1BW4
        rank 2   2F0   2F1   2BW0  2BW1  2F2   2F3   2BW2  2BW3  2F4   2BW4

    - Bubble: (p-1)(F+B+W), as 1F1B's, whatever k is. Messages of c add 2(p-1)c once, and not in
      every round as in 1F1B, where 2c <= (k-1)(F+B+W).
    - Peak memory: k p activations on rank 0, k(p-s) on rank s; at most m.

    Raises:
        ValueError: `memory_limit` does not hold one microbatch.
    """
    from megatron_zbpp.schedules.construct.draft import equal_costs, within

    p, m = num_ranks, num_microbatches
    held = (costs or equal_costs(Placement.loop(p))).amounts['activation']
    limit = inf if memory_limit is None else memory_limit
    # 1, 2, 4, ... up to the first that holds all microbatches
    powers = [1 << i for i in range((m - 1).bit_length() + 1)]
    sizes = [
        k
        for k in powers
        if k == 1 or all(within(min(k * (p - r), m) * a, limit) for r, a in enumerate(held))
    ]
    if costs is None:
        k = min(_USUAL, sizes[-1])
    else:
        k = min(sizes, key=lambda size: (_makespan(_orders(m, size, held, limit), costs), size))
    orders = _orders(m, k, held, limit)
    return Schedule.of('kfkb', Placement.loop(p), m, orders)


def _orders(m: int, k: int, held: tuple[float, ...], limit: float) -> list[list[Phase]]:
    p, most = len(held), m
    orders: list[list[Phase]] = []
    for rank, activation in enumerate(held):
        most = min(most, in_flight(min(k * (p - rank), m), rank, activation, limit))
        ahead = max(0, most - k)
        table = [
            (ahead, 'F', 'warm-up'),
            (-(-(m - ahead) // k), 'F ' * k + 'BW ' * k, 'steady'),
            (m, 'BW', 'cool-down'),
        ]
        orders.append(phases([rank], m, table))
    return orders


def _makespan(orders: list[list[Phase]], costs: Costs) -> float:
    from megatron_zbpp.schedules.construct.draft import Draft  # for few schedules

    left = [deque(p for phase in order for p in phase.passes) for order in orders]
    draft = Draft(Placement.loop(len(left)), len(left[0]) // 2, costs)
    while any(left):
        for order in left:
            while order and draft.arrival(order[0]) < inf:
                draft.put(order.popleft())
    return draft.makespan
