"""Activations that each rank holds: a function of its order alone, never of times."""

from __future__ import annotations

from itertools import accumulate

from megatron_zbpp.ir import BW, B, F, Schedule, W
from megatron_zbpp.planning.costs import Costs

_DIGITS = 9  # amounts are rounded to so many decimals: three thirds of an activation are one
RESOLUTION = 10**-_DIGITS


def live(schedule: Schedule, costs: Costs) -> tuple[tuple[float, ...], ...]:
    """Activations held after each pass, per rank, parallel to `schedule.passes`.

    F adds the stage's `activation` at its start; B releases what is not `retained` at its end; W
    releases the rest, BW all. Nothing releases what a forward-only schedule adds.
    """
    costs.require(schedule.placement)
    held = tuple(zip(costs.activation, costs.retained, strict=True))
    change = {
        F: [full for full, _ in held],
        B: [kept - full for full, kept in held],
        W: [-kept for _, kept in held],
        BW: [-full for full, _ in held],
    }
    return tuple(
        _held([change[kind][stage] for kind, stage, _ in order]) for order in schedule.passes
    )


def _held(changes: list[float]) -> tuple[float, ...]:
    # Adding 0 turns -0.0 into 0.0.
    return tuple([round(amount, _DIGITS) + 0.0 for amount in accumulate(changes)])


def peak(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Most activations that each rank ever holds, in the unit of `costs.activation`."""
    return tuple(max(held, default=0.0) for held in live(schedule, costs))
