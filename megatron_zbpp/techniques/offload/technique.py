"""Offload to the host, as others know it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, TRANSFERS
from megatron_zbpp.techniques.base import Technique, lack_of_times
from megatron_zbpp.techniques.copies import way_by_copies
from megatron_zbpp.techniques.offload.graph import offload
from megatron_zbpp.techniques.offload.place import FREE, offloaded, with_offload

_SLOTS = (1.25, 1.5, 2.0)  # of copies, over the time that they take


def _lacks(costs: Costs) -> str | None:
    if lack := lack_of_times(costs, TRANSFERS[HOST]):
        return lack
    if not all(all(costs.times[kind]) for kind in TRANSFERS[HOST]):
        return 'costs say that a copy takes no time: give above 0'
    return None


def _with_slower_copies(costs: Costs) -> Iterator[Costs]:
    """Yield costs whose copies take longer: schedules have fewer then, and wait less for them."""
    for slower in _SLOTS:
        ways = {kind: tuple(slower * t for t in costs.times[kind]) for kind in TRANSFERS[HOST]}
        yield costs.with_times(**ways)


TECHNIQUE = Technique(
    'offload',
    'to the host and back',
    graph=offload,
    place=lambda schedule, stages, costs, _: with_offload(schedule, stages, costs),
    request=offloaded,
    free=FREE,
    lacks=_lacks,
    way=partial(way_by_copies, pool=HOST),
    to=HOST,
    variants=_with_slower_copies,
    exact='megatron_zbpp.planner.exact_offload:solve_offload',
)
