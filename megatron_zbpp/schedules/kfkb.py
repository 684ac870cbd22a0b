"""kFkB: k forwards, then k backwards, so that messages of one run while another computes."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING

from megatron_zbpp.ir import Phase, Placement, Schedule
from megatron_zbpp.schedules.construct.draft import Draft, equal_costs, within
from megatron_zbpp.schedules.construct.phases import phases
from megatron_zbpp.schedules.one_f_one_b_pb import in_flight
from megatron_zbpp.schedules.registry import Formula, family

if TYPE_CHECKING:
    from megatron_zbpp.ir.costs import Costs

_USUAL = 2  # k, where no times tell a better one


@family(
    'kfkb',
    summary='k forwards and k backwards by turns, k chosen for the messages',
    bubble=Formula('(p-1)(F+B+W)', lambda at: (at.p - 1) * at.S),
    memory=Formula('2p, or the limit', lambda at: min(_USUAL * at.p, at.m)),
    source='Ada-Grouper, arXiv 2303.01675',
    aliases=('Ada-Grouper',),
)
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
    - When: links are slow, the backward cannot be split, and there is memory for two of 1F1B or
      more. Else `zb-2p` hides messages in the same memory and has less bubble. `auto` weighs it
      with the messages that it has measured.

    Raises:
        ValueError: `memory_limit` does not hold one microbatch.
    """
    p, m = num_ranks, num_microbatches
    held = (costs or equal_costs(Placement.loop(p))).amounts['activation']
    limit = inf if memory_limit is None else memory_limit
    sizes = [k for k in _powers(m) if k == 1 or _fits(k, m, held, limit)]
    if costs is None:
        k = min(_USUAL, sizes[-1])
    else:
        k = min(sizes, key=lambda size: (_makespan(_orders(m, size, held, limit), costs), size))
    orders = _orders(m, k, held, limit)
    return Schedule.of('kfkb', Placement.loop(p), m, orders)


def _powers(m: int) -> list[int]:
    """Return 1, 2, 4, ... up to the first that holds all microbatches."""
    below = takewhile(lambda k: k < m, (1 << i for i in range(m.bit_length())))
    return [*below, 1 << (m - 1).bit_length()]


def _fits(k: int, m: int, held: tuple[float, ...], limit: float) -> bool:
    return all(
        within(min(k * (len(held) - rank), m) * each, limit) for rank, each in enumerate(held)
    )


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
    """Return the time that they take by these costs."""
    left = [deque(p for phase in order for p in phase.passes) for order in orders]
    draft = Draft(Placement.loop(len(left)), len(left[0]) // 2, costs)
    while any(left):
        for order in left:
            while order and draft.arrival(order[0]) < inf:
                draft.put(order.popleft())
    return draft.makespan
