"""Recomputation, as others know it."""

from __future__ import annotations

from megatron_zbpp.ir import F, Task
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import R
from megatron_zbpp.techniques.base import Life, Technique, Way, lack_of_times
from megatron_zbpp.techniques.recompute.graph import recompute
from megatron_zbpp.techniques.recompute.place import recomputed, with_recomputation


def _lacks(costs: Costs) -> str | None:
    if lack := lack_of_times(costs, (R,)):
        return lack
    if 'input' not in costs.amounts:
        return (
            'costs do not say what the input of a stage takes, which is kept: give a file with '
            '"amounts": {"input": [...]}'
        )
    return None


def _way(costs: Costs, stage: int, life: Life) -> Way:
    """Return its needs: the input is held until it runs again, and from then on all of it."""
    again = costs.time(Task(R, stage)) / life.speed
    before = 0.0
    if life.stays:  # the input is there all the time
        kept = min(costs.amount('input', Task(F, stage)), life.held)
        before = kept * max(0.0, life.there - again - life.backward)
    return Way(again, 0.0, before + life.held * min(life.there, again + life.backward))


TECHNIQUE = Technique(
    'recompute',
    'made again before B',
    graph=recompute,
    place=lambda schedule, stages, costs, _: with_recomputation(schedule, stages, costs),
    request=recomputed,
    lacks=_lacks,
    way=_way,
)
