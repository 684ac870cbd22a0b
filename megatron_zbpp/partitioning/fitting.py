"""Layers and slower ranks from measured times of stages.

The time of a stage is the sum of its layers and a constant.

Least squares over the kinds of layers, none below 0, F, B and W each by itself. Several measured
layouts may be fitted together; what they cannot tell apart counts as far as it can to the kind of
which there are most layers: of `Ett|ttL` the embedding takes only what the second stage lacks.

Slower ranks are found by the times of layers of one kind, or of the same stages elsewhere. Within a
pipeline only stages count whose layers are all of one kind, so that neither embedding nor output
layer is taken for a slow machine. The usual rank among them has factor 1, as has a rank without
such a stage. Between pipelines that are replicas, a rank is compared with those of its own stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import fsum
from statistics import median, median_low

from megatron_zbpp.ir import B, F, Placement, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.plan_costs import message_times
from megatron_zbpp.partitioning.layers import KINDS, Device, Devices, Layer, Layers
from megatron_zbpp.techniques.slices.balance import non_negative

_LEAST = 0.05  # a smaller difference is that of measuring
_SLOW = 1.2  # times as long as usual: then a rank of a replica is worth a word
_MANY = 3  # of fewer replicas none is the usual one


def rank_factors(stages: Sequence[str], ranks: Sequence[int], costs: Costs) -> tuple[float, ...]:
    """Return the factors by which ranks multiply the times of layers; 1 where they are unknown.

    >>> costs = Costs.of(*[(2.0, 2.0, 3.0, 4.0)] * 3)
    >>> rank_factors(('Ett', 'tt', 'tt', 'tL'), (0, 1, 2, 3), costs)
    (1.0, 1.0, 1.5, 1.0)
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
    stages, whose `hops` say it. Where layers of a letter are not alike, no rank is taken for a
    slower one.
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

    Nothing where there are fewer than three pipelines: of two, neither is the usual one. `found`
    has the ranks of the job in a pipeline, and what its stages took, once or more for each.

    >>> usual, slow = Costs.of(*[(1.0, 1.0)] * 3), Costs.of(*[(1.0, 1.5)] * 3)
    >>> slow_ranks([((0, 3), usual), ((1, 4), slow), ((2, 5), usual)], Placement.loop(2))
    {4: 1.5}
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


_TIMED = {'forward': F, 'backward': B, 'weight': W}  # fields of a layer, by kind
_CONSTANT = ''  # the kind of what each stage takes whatever its layers


def fit_layers(
    measured: Sequence[tuple[str, Costs]],
    constant: bool = False,
    factors: Sequence[float] | None = None,
) -> tuple[Layers, float]:
    """Return the layers of the first layout, and the largest error of a stage, as a share.

    `measured` are layouts such as `Ett|tt|ttL`, each with times of its stages. With `constant` each
    stage may take a time of its own. `factors` multiply the times of the rank of each stage, of all
    layouts in turn.
    """
    layouts = [text.split('|') for text, _ in measured]
    for (text, costs), stages in zip(measured, layouts, strict=True):
        unknown = ''.join(sorted({*text} - KINDS - {'|'}))
        if unknown or not text.strip('|'):
            raise ValueError(
                f'layout {text!r} has {unknown or "nothing"} for layers: give such as Ett|ttL, or '
                "letters of a hybrid model's pattern"
            )
        if len(stages) != costs.num_stages:
            raise ValueError(
                f'layout {text} has {len(stages)} stages, its times {costs.num_stages}: give '
                'one entry per stage'
            )
        if ''.join(stages) != ''.join(layouts[0]):
            raise ValueError(f'layout {text} has other layers than {measured[0][0]}')
    counts = Counter(''.join(layouts[0]))
    kinds = sorted(counts, key=lambda kind: (-counts[kind], kind)) + [_CONSTANT] * constant
    rows = [
        [float(stage.count(kind)) if kind else 1.0 for kind in kinds]
        for stages in layouts
        for stage in stages
    ]
    found: dict[str, dict[str, float]] = {}  # by field of `Layer`, and kind of layer
    error = 0.0
    for name, kind in _TIMED.items():
        values = [value for _, costs in measured for value in costs.times[kind]]
        own = rows
        if factors:
            own = [[x * each for x in row] for row, each in zip(rows, factors, strict=True)]
        solved = non_negative(own, values)
        found[name] = dict(zip(kinds, solved, strict=True))
        scale = max(values, default=0.0) or 1.0
        for row, value in zip(own, values, strict=True):
            predicted = sum(x * y for x, y in zip(row, solved, strict=True))
            error = max(error, abs(predicted - value) / scale)
    for name in ('activation', 'retained', 'parameters'):
        held = (c.parameters if name == 'parameters' else c.amounts[name] for _, c in measured)
        solved = non_negative(rows, [value for own in held for value in own])
        found[name] = dict(zip(kinds, solved, strict=True))
    made = [
        Layer(kind, **{name: each[kind] for name, each in found.items()})
        for kind in ''.join(layouts[0])
    ]
    return Layers(tuple(made)), error
