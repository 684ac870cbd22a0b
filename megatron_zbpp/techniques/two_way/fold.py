"""A two-way pipeline of D = 2P ranks as two replicas of a pipeline of P ranks.

Ranks that hold the same stages are the replicas of one rank of the folded pipeline: of a V, where
each way is a loop. What is two-way is that a microbatch goes on in the other replica at the turn.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_zbpp.ir import Placement, Schedule


def folded(placement: Placement) -> Placement:
    """Return where one replica has its stages; of one way, the placement itself.

    >>> folded(Placement.two_way(4)).only_route
    (0, 1, 1, 0)

    Raises:
        ValueError: the ranks are no pairs that hold the same stages.
    """
    if placement.is_one_way:
        return placement
    held = [placement.stages(rank) for rank in range(placement.num_ranks)]
    names = {stages: name for name, stages in enumerate(dict.fromkeys(held))}
    if any(held.count(stages) != 2 for stages in names):
        raise ValueError(
            f'placement {placement.routes} cannot be two replicas because its ranks are no pairs '
            'that hold the same stages: give both routes the mirror image of each other'
        )
    return Placement(tuple(names[held[rank]] for rank in placement.routes[0]), 'folded')


def over_replicas(schedule: Schedule, one: Placement) -> Schedule:
    """Return it with rank 2k + h for rank k of the replica h of a pair.

    The first replica is where microbatches of route 0 come first.

    Args:
        schedule: two-way.
        one: the folded placement, in the order of ranks that is wanted.
    """
    where = schedule.placement
    names: dict[int, int] = {}
    for stage, rank in enumerate(where.routes[0]):
        first = 2 * one.only_route[stage]
        names.setdefault(rank, first + (first in names.values()))
    return _renamed(schedule, names)


def _renamed(schedule: Schedule, names: dict[int, int]) -> Schedule:
    where, order = schedule.placement, sorted(names, key=lambda rank: names[rank])
    routes = (tuple(names[rank] for rank in route) for route in where.routes)
    first, opposite = routes
    return replace(
        schedule,
        placement=Placement(first, where.name, opposite, where.route),
        passes=tuple(schedule.passes[rank] for rank in order),
        together=frozenset((names[rank], at) for rank, at in schedule.together),
        phases=tuple(schedule.phases[rank] for rank in order) if schedule.phases else (),
    )
