"""Activations that each rank holds: a function of its order alone, never of times.

What a stage holds between its F and B is `activation`, between B and W `retained`. While B runs, it
gives up the one layer by layer and takes the other: the most is at one of its ends. So B may raise
what a rank holds, and that counts at the end of B.
"""

from __future__ import annotations

from itertools import accumulate

from megatron_zbpp.analysis.departures import stored
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import DEVICE

_DIGITS = 9  # amounts are rounded to so many decimals: three thirds of an activation are one
RESOLUTION = 10**-_DIGITS


def live(schedule: Schedule, costs: Costs, pool: str = DEVICE) -> tuple[tuple[float, ...], ...]:
    """Return activations held in `pool` after each pass, per rank, parallel to `schedule.passes`.

    It is the sum of what the graph says of each pass: in a plain pipeline F adds the stage's
    `activation` at its start, B puts `retained` in its place at its end, W releases that, BW all.
    Nothing releases what a forward-only schedule adds.
    """
    costs.require(schedule.placement)
    change = costs.changes(schedule.graph, pool)
    return tuple(
        _held([change.get((kind, stage, cut), 0.0) for kind, stage, _, cut in order])
        for order in schedule.passes
    )


def highest(schedule: Schedule, costs: Costs) -> tuple[tuple[float, ...], ...]:
    """Return the most activations held from each pass's start to its end, without those before.

    As `live`, but for a pass of several tasks, such as BW, where others do them one by one: it does
    so, too, and between B and W holds `retained`. Else autograd frees what it has used. The most
    that a rank keeps for its partner counts all the time: when that comes is up to the partner.
    """
    after, kinds = live(schedule, costs), schedule.graph.kinds
    kept = stored(schedule, costs)
    if any(kept):
        after = tuple(
            tuple(amount + more for amount in amounts)
            for amounts, more in zip(after, kept, strict=True)
        )
    ran = {p.kind for _, p in schedule}
    one_by_one = {kind for kind in ran if not ran.isdisjoint(kinds[kind].parts)}
    if not one_by_one:
        return after
    change = costs.changes(schedule.graph)

    def within(kind: str, stage: int, cut: int) -> float:
        sums = list(accumulate(change[part, stage, cut] for part in kinds[kind].parts))
        return max(sums) - sums[-1]

    return tuple(
        tuple(
            round(amount + within(p.kind, p.stage, p.slice), _DIGITS)
            if p.kind in one_by_one
            else amount
            for p, amount in zip(order, amounts, strict=True)
        )
        for order, amounts in zip(schedule.passes, after, strict=True)
    )


def _held(changes: list[float]) -> tuple[float, ...]:
    # Adding 0 turns -0.0 into 0.0.
    return tuple([round(amount, _DIGITS) + 0.0 for amount in accumulate(changes)])


def peak(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the most activations that each rank ever holds, in the unit of `costs.amounts`."""
    return tuple(max(held, default=0.0) for held in highest(schedule, costs))
