"""Order of an evaluation: forwards alone, in an order that is not made for backwards."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from megatron_zbpp.analysis.lowering import usual_costs
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import F, Pass, Schedule


def evaluation(schedule: Schedule) -> Schedule:
    """Return the schedule's forwards in the order that takes less time, if stages take equal time.

    One is that of `schedule`. In the other a microbatch begins as soon as it meets no earlier one:
    no rank is to run two stages at once, if each passes on at once. In a loop that gives groups of
    p microbatches, in a V one microbatch for each two stages.
    """
    own = schedule.forward_only()
    both = replace(own, passes=_unhindered(own)), own
    return min(both, key=lambda each: simulate(each, usual_costs(each)).makespan)


def _unhindered(schedule: Schedule) -> tuple[tuple[Pass, ...], ...]:
    """Return the orders in which no microbatch, or slice of it, waits for another one."""
    cut, routes = schedule.graph.num_slices, len(schedule.placement.routes)
    early = 1 + len(schedule.graph.kinds)  # longer than any chain of passes before a forward
    units: dict[int, list[tuple[int, Pass]]] = defaultdict(list)
    for rank, p in schedule:
        units[p.microbatch // routes * cut + p.slice].append((rank, p))
    turns: dict[Pass, tuple[int, int]] = {}  # in forwards of a stage; passes of a unit tie
    taken: set[tuple[int, int]] = set()  # by ranks, with forwards
    begin = 0
    for unit, own in sorted(units.items()):
        stages = [(rank, p.stage) for rank, p in own if p.kind == F]
        while any((rank, begin + stage) in taken for rank, stage in stages):
            begin += 1
        taken.update((rank, begin + stage) for rank, stage in stages)
        left = [p for _, p in own]
        while left:
            for p in left:
                inputs = schedule.predecessors(p) if p.kind != F else ()
                if turns.keys() >= set(inputs):
                    at = max((turns[q][0] for q in inputs), default=begin - early) + 1
                    turns[p] = begin + p.stage if p.kind == F else at, unit
            left = [p for p in left if p not in turns]
    return tuple(tuple(sorted(order, key=turns.__getitem__)) for order in schedule.passes)
