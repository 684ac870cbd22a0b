"""Eviction to a partner, as others know it."""

from __future__ import annotations

from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import PARTNER
from megatron_zbpp.techniques.base import Life, Technique, Way
from megatron_zbpp.techniques.evict.place import with_eviction
from megatron_zbpp.techniques.offload.copies import lack_of_copies, way_by_copies
from megatron_zbpp.techniques.offload.graph import offload


def _lacks(costs: Costs) -> str | None:
    return lack_of_copies(costs, PARTNER)


def _way(costs: Costs, stage: int, life: Life) -> Way:
    return way_by_copies(costs, stage, life, PARTNER)


TECHNIQUE = Technique(
    'evict',
    'to a partner and back',
    graph=offload,
    place=with_eviction,
    lacks=_lacks,
    way=_way,
    to=PARTNER,
)
