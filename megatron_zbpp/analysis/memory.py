"""Activations that each rank holds: a function of its order alone, never of times.

What a stage holds between its F and B is `activation`, between B and W `retained`. While B runs, it
gives up the one layer by layer and takes the other: the most is at one of its ends. So B may raise
what a rank holds, and that counts at the end of B.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron_zbpp.ir import F, Pass, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import DEVICE, PARTNER, compiled


def begun(schedule: Schedule) -> dict[Pass, list[Pass]]:
    """Return the passes that free memory, by the pass behind which each begins, its last need.

    Copies of a rank run in its order, whichever way they go: one out begins behind the one before.
    """
    found: dict[Pass, list[Pass]] = {}
    flat = compiled(schedule.graph)
    for order in schedule.passes if flat.leaving else ():
        latest = 0  # place of the copy before, where it begins
        at = {p: place for place, p in enumerate(order)}
        for place, p in enumerate(order):
            if p.kind in flat.leaving:
                latest = max(latest, *(at[q] for q in schedule.predecessors(p)))
                found.setdefault(order[latest], []).append(p)
            elif p.kind in flat.arriving:
                latest = place
    return found


def stored(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the most that each rank keeps for its partner, in the unit of `costs.amounts`.

    From where the partner begins to send it to where that takes memory for it again.
    """
    flat = compiled(schedule.graph)
    most = [0.0] * schedule.num_ranks
    if not flat.between_partners:
        return tuple(most)
    change, behind = costs.changes(schedule.graph, PARTNER), begun(schedule)
    for rank, order in enumerate(schedule.passes):
        changes: list[float] = []
        for p in order:
            if p.kind in flat.arriving:
                changes.append(change.get((p.kind, p.stage, p.slice), 0.0))
            changes += [change.get((q.kind, q.stage, q.slice), 0.0) for q in behind.get(p, ())]
        most[schedule.placement.partner(rank)] = max(accumulate(changes), default=0.0)
    return tuple(most)


class Lifetime(NamedTuple):
    """Places in the order of a rank between which an activation is saved."""

    forward: Pass  # that saves it
    first: int  # place of the forward
    last: int  # place of the pass that takes it: B, or R where that comes first


def lifetimes(
    order: Sequence[Pass], stages: Collection[int], copies: Collection[str] = ()
) -> Iterator[Lifetime]:
    """Yield the lifetimes of a rank, those that end first before others.

    `copies` are kinds of passes that move what is saved, and take nothing.
    """
    begun: dict[tuple[int, ...], int] = {}
    for at, p in enumerate(order):
        if p.stage not in stages or p.kind in copies:
            continue
        if p.kind == F:
            begun[p[1:]] = at
        elif p[1:] in begun:
            first = begun.pop(p[1:])
            yield Lifetime(order[first], first, at)


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
