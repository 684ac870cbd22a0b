"""Costs of plans: as a file has them, and with the ranks in reverse order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from megatron_zbpp.ir.costs import Costs


def written(costs: Costs) -> dict[str, Any]:
    """Return the fields for a file, which `Costs.from_json` reads to an equal value.

    What is as by default is left out, but for times and amounts.
    """
    plain, own = (asdict(each) for each in (Costs(costs.times, costs.amounts), costs))
    others = {name: value for name, value in own.items() if value != plain[name]}
    return {'times': costs.times, 'amounts': costs.amounts, **others}


def in_reverse(costs: Costs, num_ranks: int) -> Costs:
    """Return the same with rank r renamed to p-1-r, and its shards with it."""
    last, stages = num_ranks - 1, costs.num_stages

    def renamed(named: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        return {name: own[:stages] + own[stages:][::-1] for name, own in named.items()}

    return replace(
        costs,
        times=renamed(costs.times),
        amounts=renamed(costs.amounts),
        parts=renamed(costs.parts),
        edges=tuple((last - a, last - b, latency) for a, b, latency in costs.edges),
        speeds=costs.speeds[::-1],
    )
