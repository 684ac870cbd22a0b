"""Better partitions from one: the moves of AdaPtis (OctoPipe, arXiv 2509.23722), by its rule.

If ranks idle so differently that the lightest layer could even it out, layers move between stages,
from busy ranks to idle ones. Else, if most of the idle time is at the ends of the ranks' windows,
the placement moves: devices change places. Else it is the schedule's turn, which planning does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from megatron_zbpp.partitioning.bounds import Bounds
from megatron_zbpp.partitioning.ranking import Ranked, rank
from megatron_zbpp.partitioning.space import Space
from megatron_zbpp.partitioning.stages import Partition
from megatron_zbpp.planner.ends import replay_whole
from megatron_zbpp.planner.problem import EPSILON

_FEW = 16  # ranks of which all pairs are looked at
_TRIED = 12  # neighbours that are simulated in a round, the best by their bound first


def climb(
    space: Space,
    bounds: Bounds,
    start: Partition,
    names: tuple[str, ...],
    go_on: Callable[[Ranked], bool],
) -> Ranked | None:
    """Return the best partition found from `start`, round by round as long as one helps.

    Args:
        space: of partitions.
        bounds: of that space.
        start: where to begin.
        names: of schedules to simulate; () for those that suit.
        go_on: is told each partition that was simulated; False ends it.
    """
    best = rank(space, start, names, draft=False)
    tried = {start}
    while best is not None and go_on(best):
        near = [other for other in _neighbours(space, best) if other not in tried]
        near.sort(key=bounds.of)
        better: Ranked | None = None
        for other in near[:_TRIED]:
            tried.add(other)
            if bounds.of(other) >= best.value:
                break
            found = rank(space, other, names, draft=False)
            if found is None:
                continue
            if found.value < (better or best).value - EPSILON:
                better = found
            if not go_on(found):
                return better or best
        if better is None:
            return best
        best = better
    return best


def _neighbours(space: Space, ranked: Ranked) -> Iterator[Partition]:
    """Yield partitions one move away, of the kind that the rule picks; in the end of both kinds."""
    idle, ends, inside = _bubbles(ranked)
    partition = ranked.partition
    if max(idle) - min(idle) > space.layers.lightest or ends <= inside or space.keep_order:
        yield from moved_layers(space, partition, idle)
    if not space.keep_order and not space.alike:
        yield from swapped(space, partition)


def _bubbles(ranked: Ranked) -> tuple[list[float], float, float]:
    """Return idle time of each rank, and of all ranks: at the ends, and between passes."""
    problem = ranked.problem
    value, ends = replay_whole(problem, ranked.orders)
    idle: list[float] = []
    outside = inside = 0.0
    for queues, work, first in zip(problem.queues, problem.work, problem.firsts, strict=True):
        last = max(ends[queue][-1] for queue in queues)
        idle.append(value - work)
        outside += first + max(0.0, value - last)
        inside += last - first - work
    return idle, outside, inside


def moved_layers(space: Space, partition: Partition, idle: Sequence[float]) -> Iterator[Partition]:
    """Yield partitions where one layer has left a stage for another, those between passing one on.

    From the busiest rank to the idlest first.
    """
    ranks, cuts = partition.placement.only_route, partition.cuts
    by_work = sorted(range(len(cuts)), key=lambda stage: idle[ranks[stage]])
    for giver in by_work[:_FEW]:
        for taker in by_work[::-1][:_FEW]:
            if giver == taker or cuts[giver] < 2:
                continue
            moved = list(cuts)
            moved[giver] -= 1
            moved[taker] += 1
            other = Partition(partition.placement, tuple(moved), partition.order)
            if space.allowed(other):
                yield other


def swapped(space: Space, partition: Partition) -> Iterator[Partition]:
    """Yield partitions where two unlike devices change places, or a run of them is reversed."""
    order, output = partition.order, max(layer.output for layer in space.layers)
    own = space.devices.signature(order, output), tuple(space.limits[d] for d in order)
    linked = bool(space.devices.latency or space.devices.bandwidth)
    for a, b in combinations(range(len(order)), 2):
        if len(order) > _FEW and (b - a) & (b - a - 1):
            continue  # of many devices, those whose distance is a power of two
        turned = [*order[:a], *order[a : b + 1][::-1], *order[b + 1 :]]
        exchanged = list(order)
        exchanged[a], exchanged[b] = order[b], order[a]
        for changed in (exchanged, turned) if linked and b > a + 1 else (exchanged,):
            key = space.devices.signature(changed, output), tuple(space.limits[d] for d in changed)
            if key != own:
                yield Partition(partition.placement, partition.cuts, tuple(changed))
