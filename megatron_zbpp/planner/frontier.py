"""Frontiers: the best plans under several limits, none worse than one under less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_zbpp.planner.cache import planned
from megatron_zbpp.planner.plans import Candidate, Plan, PlanningInterrupted


class FrontierInterrupted(KeyboardInterrupt):
    """Ctrl-C while planning under several limits.

    Attributes:
        found: what `frontier` would have returned, up to the limit that was being planned.
    """

    def __init__(self, found: list[tuple[float, Plan, bool]]) -> None:
        super().__init__()
        self.found = found


def frontier(
    folder: Path | None,
    candidates: Sequence[Candidate],
    num_microbatches: int,
    limits: Sequence[float],
    *,
    seconds: float = 60.0,
    progress: Callable[[float], None] | None = None,
    **inputs: object,
) -> list[tuple[float, Plan, bool]]:
    """Plan from the tightest limit to the loosest: each starts from all before it.

    Args:
        folder: of the cached plans, or None.
        candidates: see `plan`.
        num_microbatches: see `plan`.
        limits: most that a rank may hold, in the unit of `costs.amounts`.
        seconds: for all of them together, at most.
        progress: called now and then with the share of the budget that is spent.
        inputs: further keyword arguments of `plan`.

    Returns:
        Each limit with its plan, and whether that was on disk.

    Raises:
        FrontierInterrupted: by Ctrl-C; it has the best plans by then.
        ValueError: as `plan` does.
    """
    report = progress or _unseen
    found: list[tuple[float, Plan, bool]] = []
    for at, limit in enumerate(sorted(set(limits))):
        try:
            plan, cached = planned(
                folder,
                candidates,
                num_microbatches,
                memory_limit=limit,
                seconds=seconds / len(set(limits)),
                starts=tuple(plan.schedule for _, plan, _ in found),
                progress=lambda share, at=at: report((at + share) / len(set(limits))),
                **inputs,
            )
        except PlanningInterrupted as interruption:
            found.append((limit, interruption.best, False))
            raise FrontierInterrupted(found) from None
        found.append((limit, plan, cached))
    return found


def _unseen(share: float) -> None:
    """Show nobody how far it is."""
