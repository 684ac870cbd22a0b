"""Slower ranks: by the times of layers of one kind, or of the same stages elsewhere.

Within a pipeline only stages count whose layers are all of one kind, so that neither embedding nor
output layer is taken for a slow machine. The usual one of those ranks has 1, and so has who has no
such stage. Between pipelines that are replicas, a rank is compared with those of its own stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import fsum
from statistics import median, median_low

from megatron_zbpp.ir import B, F, Placement, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.plan_costs import message_times
from megatron_zbpp.partitioning.devices import Device, Devices

_LEAST = 0.05  # a smaller difference is that of measuring
_SLOW = 1.2  # times as long as usual: then a rank of a replica is worth a word
_MANY = 3  # of fewer replicas none is the usual one


def rank_factors(stages: Sequence[str], ranks: Sequence[int], costs: Costs) -> tuple[float, ...]:
    """Return by what each rank multiplies the times of layers; 1 where that cannot be told.

    >>> costs = Costs.of(*[(2.0, 2.0, 3.0, 4.0)] * 3)
    >>> rank_factors(('Ett', 'tt', 'tt', 'tL'), (0, 1, 2, 3), costs)
    (1.0, 1.0, 1.5, 1.0)

    Args:
        stages: the letters of their layers, in model order.
        ranks: of the stages.
        costs: of the stages, measured.
    """
    same = [stage for stage, own in enumerate(stages) if len(set(own)) == 1]
    holders = Counter(kind for kind, _ in {(stages[s][0], ranks[s]) for s in same})
    kind, count = holders.most_common(1)[0] if holders else ('', 0)
    factors = [1.0] * (max(ranks) + 1)
    if count < 2:
        return tuple(factors)
    taken: dict[int, list[float]] = defaultdict(list)
    for stage in same:
        if stages[stage][0] == kind:
            time = costs.times[F][stage] + costs.times[B][stage] + costs.times[W][stage]
            taken[ranks[stage]].append(time / len(stages[stage]))
    means = {rank: sum(times) / len(times) for rank, times in taken.items()}
    usual = median_low(means.values())
    for rank, mean in means.items():
        if usual > 0 and mean > 0 and abs(mean / usual - 1) > _LEAST:
            factors[rank] = mean / usual
    return tuple(factors)


def measured_devices(
    stages: Sequence[str], placement: Placement, costs: Costs, layers_alike: bool = True
) -> Devices:
    """Return the ranks as devices: their factors, and links that take what messages took.

    Of unlike messages between two ranks links take what the fastest took: the rest is of the
    stages, whose `hops` say it.

    Args:
        stages: the letters of their layers, in model order.
        placement: of the stages.
        costs: of the stages, measured.
        layers_alike: whether layers of a letter are; if not, no rank is taken for a slower one.
    """
    ranks = range(placement.num_ranks)
    factors = (1.0,) * len(ranks)
    if layers_alike and len(stages) == placement.num_stages:
        factors = rank_factors(stages, placement.only_route, costs)
    known = {pair: min(times) for pair, times in message_times(costs, placement).items()}
    links = tuple(tuple(known.get((a, b), costs.edge(a, b)) for b in ranks) for a in ranks)
    return Devices(tuple(Device(str(rank), (x, x, x)) for rank, x in enumerate(factors)), links)


def slow_ranks(
    found: Iterable[tuple[Sequence[int], Costs]], placement: Placement
) -> dict[int, float]:
    """Return the ranks that take longer than others for the same stages, and how many times.

    Nothing where there are fewer than three pipelines: of two, neither is the usual one.

    >>> usual, slow = Costs.of(*[(1.0, 1.0)] * 3), Costs.of(*[(1.0, 1.5)] * 3)
    >>> slow_ranks([((0, 3), usual), ((1, 4), slow), ((2, 5), usual)], Placement.loop(2))
    {4: 1.5}

    Args:
        found: ranks of the job in a pipeline, and what its stages took, once or more for each.
        placement: of the stages on the ranks of a pipeline.
    """
    taken: dict[tuple[int, int], list[float]] = defaultdict(list)
    for ranks, costs in found:
        for at, rank in enumerate(ranks):
            own = placement.stages(at)
            times = (costs.times[F], costs.times[B], costs.times[W])
            taken[at, rank].append(fsum(kind[stage] for kind in times for stage in own))
    slower: dict[int, float] = {}
    for at in range(placement.num_ranks):
        usually = {rank: median(each) for (where, rank), each in taken.items() if where == at}
        if len(usually) >= _MANY:
            usual = median_low(usually.values())
            slower |= {rank: t / usual for rank, t in usually.items() if t > _SLOW * usual > 0}
    return slower
