"""Times and needs of copies of activations, to the host and to a partner alike."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_zbpp.ir import B, F, Task, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, TRANSFERS
from megatron_zbpp.techniques.base import Life, Way

USUAL_RATIO = 1.0
"""Time of a copy out and back over that of F, B and W, where nobody says it."""


def way_by_copies(costs: Costs, stage: int, life: Life, pool: str) -> Way:
    """Return needs of what is held during F, until it has left, and from coming back to B's end."""
    copies = sum(costs.time(Task(kind, stage)) for kind in TRANSFERS[pool]) / life.speed
    return Way(0.0, copies, life.held * min(life.there, life.forward + copies + life.backward))


def copy_ratio(costs: Costs) -> float:
    """Return k: time of both ways of an activation over that of its F, B and W; of the worst stage.

    Args:
        costs: with times of O and L.
    """
    works = zip(costs.times[F], costs.times[B], costs.times[W], strict=True)
    ways = zip(*(costs.times[kind] for kind in TRANSFERS[HOST]), strict=True)
    found = (sum(way) / sum(work) for way, work in zip(ways, works, strict=True) if sum(work))
    return max(found, default=0.0)


def with_copies(costs: Costs, ratio: float = USUAL_RATIO, between: Iterable[str] = ()) -> Costs:
    """Return `costs` with times of copies, where they have none: half of `ratio` (F + B + W) each.

    Args:
        costs: of the stages.
        ratio: time of a copy out and back, over that of F, B and W of what is copied.
        between: kinds of copies between ranks that take as long.

    Raises:
        ValueError: a ratio that is no number above 0.
    """
    if not ratio > 0:
        raise ValueError(f'a copy both ways in {ratio} of the time of F, B and W: give more than 0')
    if TRANSFERS[HOST].out in costs.times:
        return costs
    works = zip(costs.times[F], costs.times[B], costs.times[W], strict=True)
    ways = tuple(ratio * sum(work) / 2 for work in works)
    return costs.with_times(**dict.fromkeys((*TRANSFERS[HOST], *between), ways))
