"""Activations that leave a rank's memory, and where in its order each begins to leave."""

from __future__ import annotations

from itertools import accumulate

from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.compiled import compiled
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import PARTNER


def begun(schedule: Schedule) -> dict[Pass, list[Pass]]:
    """Return the passes that free memory by what they begin behind: after what they need.

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
