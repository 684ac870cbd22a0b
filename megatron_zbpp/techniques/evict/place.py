"""Eviction of any schedule, by what its ranks hold: see `choice`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_zbpp.analysis.memory import highest
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.composition import require_goes_with
from megatron_zbpp.techniques.evict.choice import evicted


def with_eviction(
    schedule: Schedule, stages: Collection[int], costs: Costs, limits: Sequence[float]
) -> Schedule:
    """Return `schedule` with activations of `stages` on partners where a rank holds too much.

    Args:
        schedule: in which nothing of these stages moves.
        stages: whose activations may go.
        costs: of all stages.
        limits: most that each rank may hold, in the unit of `costs.amounts`.

    Raises:
        ValueError: it has what this does not go with.
    """
    require_goes_with(schedule, 'evict')
    return evicted(schedule, stages, costs, limits, highest(schedule, costs))
