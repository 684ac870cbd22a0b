"""Costs of plans: as a file has them, with the ranks in reverse order, of other stages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from megatron_zbpp.ir import B, F, Placement, W
from megatron_zbpp.ir.costs import Costs


def written(costs: Costs) -> dict[str, Any]:
    """Return the fields for a file, which `Costs.from_json` reads to an equal value.

    What is as by default is left out, but for times and amounts.
    """
    plain, own = (asdict(each) for each in (Costs(costs.times, costs.amounts), costs))
    others = {name: value for name, value in own.items() if value != plain[name]}
    return {'times': costs.times, 'amounts': costs.amounts, **others}


def stages_file(costs: Costs, layout: str | None, routes: Sequence[Sequence[int]] = ()) -> str:
    """Return the text of `stages.json`: times of stages and messages, for --times and profile.

    `layout` is the layers of the stages, as `Ett|ttL`; `routes` are as `Placement.routes`.
    """
    known: dict[str, Any] = {} if layout is None else {'layout': layout}
    known |= {'routes': routes} if routes else {}
    known |= {kind: costs.times[kind] for kind in (F, B, W)} | {'comm': costs.comm}
    unlike = {'message': costs.message, 'edges': costs.edges, 'hops': costs.hops}
    return json.dumps(known | {name: value for name, value in unlike.items() if value}) + '\n'


def message_times(costs: Costs, placement: Placement) -> dict[tuple[int, int], list[float]]:
    """Return the times of messages between neighbouring stages, hops and all, by pair of ranks.

    >>> costs = Costs.of([1] * 4, [1] * 4, [1] * 4, comm=2, hops=[(0, 0), (0, 0), (1, 3)])
    >>> message_times(costs, Placement.v(2))
    {(0, 1): [2.0, 5.0], (1, 0): [2.0, 3.0]}
    """
    times: dict[tuple[int, int], list[float]] = {}
    for s, (a, b) in enumerate(pairwise(placement.only_route)):
        for ranks, stages in (((a, b), (s, s + 1)), ((b, a), (s + 1, s))):
            if a != b:
                times.setdefault(ranks, []).append(costs.edge(*ranks, stages))
    return times


def in_reverse(costs: Costs, num_ranks: int) -> Costs:
    """Return the same with rank r renamed to p-1-r, and its shards with it."""
    return with_ranks(costs, range(num_ranks)[::-1])


def with_ranks(costs: Costs, names: Sequence[int]) -> Costs:
    """Return the same with rank r renamed to `names[r]`, and its shards with it."""
    stages, order = costs.num_stages, sorted(range(len(names)), key=names.__getitem__)

    def renamed(named: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        return {
            name: own[:stages] + tuple(own[stages:][rank] for rank in order if own[stages:])
            for name, own in named.items()
        }

    return replace(
        costs,
        times=renamed(costs.times),
        amounts=renamed(costs.amounts),
        parts=renamed(costs.parts),
        edges=tuple((names[a], names[b], latency) for a, b, latency in costs.edges),
        speeds=tuple(costs.speeds[rank] for rank in order if costs.speeds),
    )
