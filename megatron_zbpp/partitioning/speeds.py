"""How much slower some ranks are: what layers of one kind take on each of them.

Only stages count whose layers are all of that kind, so that neither embedding nor output layer is
taken for a slow machine. The usual one of those ranks has 1, and so has who has no such stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median_low

from megatron_zbpp.ir.costs import Costs

_LEAST = 0.05  # a smaller difference is that of measuring


def rank_factors(stages: Sequence[str], ranks: Sequence[int], costs: Costs) -> tuple[float, ...]:
    """Return by what each rank multiplies the times of layers; 1 where that cannot be told.

    >>> costs = Costs(*[(2.0, 2.0, 3.0, 4.0)] * 3)
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
            time = costs.forward[stage] + costs.backward[stage] + costs.weight[stage]
            taken[ranks[stage]].append(time / len(stages[stage]))
    means = {rank: sum(times) / len(times) for rank, times in taken.items()}
    usual = median_low(means.values())
    for rank, mean in means.items():
        if usual > 0 and mean > 0 and abs(mean / usual - 1) > _LEAST:
            factors[rank] = mean / usual
    return tuple(factors)
