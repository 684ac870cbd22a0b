"""Eviction to a partner, as others know it."""

from __future__ import annotations

from functools import partial

from megatron_zbpp.ir.graph import PARTNER, TRANSFERS
from megatron_zbpp.techniques.base import Technique, lack_of_times
from megatron_zbpp.techniques.copies import way_by_copies
from megatron_zbpp.techniques.evict.place import with_eviction
from megatron_zbpp.techniques.offload.graph import offload

TECHNIQUE = Technique(
    'evict',
    'to a partner and back',
    graph=offload,
    place=with_eviction,
    lacks=partial(lack_of_times, kinds=TRANSFERS[PARTNER]),
    way=partial(way_by_copies, pool=PARTNER),
    to=PARTNER,
)
