"""The order in which stock Megatron's ranks draw a model, told by the stages that hold its parts.

Stages are texts in the language of Megatron's layout: E, t, m and L.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_zbpp.ir import Placement


class Part(NamedTuple):
    """A part of a stage that is drawn in one go.

    Attributes:
        stage: of the schedule.
        index: 0 for what comes before the layers, then the layers, then all behind them.
    """

    stage: int
    index: int


Chains = tuple[tuple[Part, ...], ...]  # by stock rank, in the order in which it draws


def chains(stock: Sequence[str], stages: Sequence[str], num_ranks: int) -> Chains:
    """Return the parts of our stages in the order in which each rank of stock Megatron draws them.

    Args:
        stock: stages of stock Megatron, which go around the ranks.
        stages: of the schedule, in model order, with the same layers.
        num_ranks: of the pipeline.

    >>> chains(['Ett', 'ttL'], ['Et', 't', 't', 'tL'], 2)[1]
    (Part(stage=2, index=1), Part(stage=3, index=1), Part(stage=3, index=2))
    """
    where: dict[str, Part] = {}
    for stage, keys in enumerate(_keys(stages)):
        layers = stages[stage].count('t')
        for key in keys:
            place = 0 if key in ('E', 'copy') else layers + 1
            where[key] = Part(stage, place)
        numbers = [key for key in keys if key.isdigit()]
        where |= {key: Part(stage, place) for place, key in enumerate(numbers, 1)}
    drawn = list(_keys(stock))
    return tuple(
        tuple(dict.fromkeys(where[key] for keys in drawn[rank::num_ranks] for key in keys))
        for rank in range(num_ranks)
    )


def _keys(stages: Sequence[str]) -> Iterator[list[str]]:
    first = 0
    for stage in stages:
        layers = range(first, first + stage.count('t'))
        first = layers.stop
        before = ['E'] if 'E' in stage else ['copy'] if 'm' in stage else []
        behind = [letter for letter in 'mL' if letter in stage]
        yield [*before, *map(str, layers), *behind]


def can_be_drawn(drawn: Chains, placement: Placement) -> bool:
    """Return whether no rank waits forever where each builds its chunks in their order.

    First and last stage wait for each other at their ends, as Megatron makes what is tied equal.

    Args:
        drawn: by stock rank.
        placement: of the stages.
    """
    before = {part: chain[:place] for chain in drawn for place, part in enumerate(chain)}
    ends, placed = (0, placement.num_stages - 1), placement.only_route
    meet = placed[0] != placed[-1]
    waiting = []
    for rank in range(placement.num_ranks):
        own = []
        for stage in placement.stages(rank):
            own += sorted(part for part in before if part.stage == stage)
            own += [stage] * (meet and stage in ends)
        waiting.append(own[::-1])
    done: set[Part] = set()
    moved = True
    while moved and any(waiting):
        moved = False
        for own in waiting:
            while own and isinstance(own[-1], Part) and done.issuperset(before[own[-1]]):
                done.add(own.pop())
                moved = True
        met = [own for own in waiting if own and not isinstance(own[-1], Part)]
        if len(met) == len(ends):
            for own in met:
                own.pop()
            moved = True
    return not any(waiting)
