"""Versions of the weights: how many updates a stage has seen before each pass."""

from __future__ import annotations

from collections import Counter

from megatron_zbpp.ir import Pass, Schedule


def weight_versions(schedule: Schedule) -> dict[Pass, int]:
    """Return for each pass how many updates of its stage come before it on its rank.

    Passes of one microbatch with different versions have stale weights (PipeDream, arXiv
    1806.03377, section 3.3: a stage keeps a copy of each version until its backward has run).
    """
    versions: dict[Pass, int] = {}
    kinds = schedule.graph.kinds
    for order in schedule.passes:
        updates = Counter[int]()  # by stage
        for p in order:
            versions[p] = updates[p.stage]
            updates[p.stage] += kinds[p.kind].of_weights
    return versions
