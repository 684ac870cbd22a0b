"""Schedules of orders that are written down."""

from megatron_zbpp.ir import Graph, Pass, Placement, Schedule, Together


def entries(order: str) -> list[Pass | Together]:
    """Passes by their labels; `(0F1&0BW0)` run as one."""
    found: list[Pass | Together] = []
    for text in order.split():
        passes = tuple(map(Pass.parse, text.strip('()').split('&')))
        found.append(Together(passes) if len(passes) > 1 else passes[0])
    return found


def by_hand(
    placement: Placement | int, num_microbatches: int, *orders: str, graph: Graph | None = None
) -> Schedule:
    """Orders of ranks, on a loop of so many ranks if the placement is a number."""
    where = Placement.loop(placement) if isinstance(placement, int) else placement
    return Schedule.of('by hand', where, num_microbatches, map(entries, orders), graph)


def texts(schedule: Schedule) -> list[str]:
    return [' '.join(map(str, order)) for order in schedule.passes]


def without(schedule: Schedule, kinds: str) -> tuple[tuple[Pass, ...], ...]:
    """The order of each rank, less passes of these kinds."""
    return tuple(tuple(p for p in order if p.kind not in kinds) for order in schedule.passes)
