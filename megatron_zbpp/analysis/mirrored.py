"""Mirror symmetry: ranks that hold copies of the same stages run them in the same order."""

from __future__ import annotations

from megatron_zbpp.ir import Schedule


def is_mirrored(schedule: Schedule) -> bool:
    """Return whether all ranks that hold the same stages run the same passes, microbatches apart.

    Then collectives between the copies of a stage, in passes or when its gradients are complete,
    come in one order on all their ranks. Where each stage is on one rank, there are none.
    """
    found: dict[tuple[int, ...], list[tuple[str, int, int]]] = {}
    for rank, order in enumerate(schedule.passes):
        own = [(p.kind, p.stage, p.slice) for p in order]
        if found.setdefault(schedule.placement.stages(rank), own) != own:
            return False
    return True
