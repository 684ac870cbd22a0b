"""Costs of the same model with its output layer whole: what shards of it are compared with."""

from __future__ import annotations

from dataclasses import replace

from megatron_zbpp.ir import B, F, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.base import lack_of_times
from megatron_zbpp.techniques.vocabulary.graph import S, T, split_vocabulary
from megatron_zbpp.techniques.vocabulary.place import USUAL_SHARE, with_shard_times

WHOLE = ' with the whole output layer on its last rank'
"""Behind the name of a schedule that shards are compared with."""


def has_shards(schedule: Schedule) -> bool:
    """Return whether the output layer is on all ranks."""
    return any(each.name == split_vocabulary.__name__ for each in schedule.graph.techniques)


def with_usual_share(schedule: Schedule, costs: Costs) -> Costs:
    """Return costs with times of shards: those that orders are made for where nobody says them."""
    if not has_shards(schedule) or S in costs.times or T in costs.times:
        return costs
    return with_shard_times(costs, schedule.placement, USUAL_SHARE)


def with_whole_layer(costs: Costs) -> Costs:
    """Return costs whose last stage takes the times of all shards, too: S is half F and half B.

    Raises:
        ValueError: shards have no times.
    """
    if lack := lack_of_times(costs, (S, T)):
        raise ValueError(lack)
    logits, weight = (sum(costs.times[kind][costs.num_stages :]) for kind in (S, T))
    more = {F: logits / 2, B: logits / 2, W: weight}
    times = {kind: own for kind, own in costs.times.items() if kind not in (S, T)}
    for kind, each in more.items():
        times[kind] = (*times[kind][:-1], times[kind][-1] + each)
    return replace(costs, times=times)


def rival_costs(schedule: Schedule, costs: Costs) -> Costs:
    """Return the costs of a schedule without shards that `schedule` is compared with."""
    timed = has_shards(schedule) and {S, T} <= costs.times.keys()
    return with_whole_layer(costs) if timed else costs
