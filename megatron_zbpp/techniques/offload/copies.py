"""Times and needs of copies of activations, to the host and to a partner alike."""

from __future__ import annotations

from megatron_zbpp.ir import Task
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import TRANSFERS
from megatron_zbpp.techniques.base import Life, Way


def lack_of_copies(costs: Costs, pool: str) -> str | None:
    """Return why costs do not say how long copies to that pool take; None: they do."""
    missing = [kind for kind in TRANSFERS[pool] if kind not in costs.times]
    if not missing:
        return None
    return (
        f'costs have no times of {" and ".join(missing)}: give a file with "times": '
        f'{{"{missing[0]}": [...]}}'
    )


def way_by_copies(costs: Costs, stage: int, life: Life, pool: str) -> Way:
    """Return needs of what is held during F, until it has left, and from coming back to B's end."""
    copies = sum(costs.time(Task(kind, stage)) for kind in TRANSFERS[pool]) / life.speed
    return Way(0.0, copies, life.held * min(life.there, life.forward + copies + life.backward))
