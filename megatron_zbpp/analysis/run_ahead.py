"""Forwards by themselves: of an evaluation, and ahead of an optimizer step that may not stand.

In an evaluation their order is not made for backwards. In a training each rank steps on what it and
the ranks before it know, and goes ahead with forwards before it is known whether that stands. One
that must not go ahead stops all behind it, so a pass may run ahead only if nothing it needs comes
from behind. What was sent ahead is received whatever happens: no message of a dropped forward is
ever taken for another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import replace
from math import inf

from megatron_zbpp.analysis.lowering import takers, usual_costs
from megatron_zbpp.analysis.program import Exchange, Instruction, Join, Program, Receive, Send
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import F, Pass, Placement, Schedule


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
    routes = len(schedule.placement.routes)
    early = 1 + len(schedule.graph.kinds)  # longer than any chain of passes before a forward
    units: dict[tuple[int, int], list[tuple[int, Pass]]] = defaultdict(list)
    for rank, p in schedule:
        units[p.microbatch // routes, p.slice].append((rank, p))
    # in forwards of a stage; passes of a unit tie
    turns: dict[Pass, tuple[int, tuple[int, int]]] = {}
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


def rank_order(placement: Placement) -> tuple[int, ...]:
    """Return ranks in the order in which an iteration begins: by the first stage of each."""
    return tuple(dict.fromkeys(placement.only_route))


def passes_ahead(schedule: Schedule) -> tuple[int, ...]:
    """Return how many of its first passes each rank may run ahead; the chain's last rank: none.

    These are forwards whose inputs come from ranks before it in the chain, where they are ahead,
    too, and whose outputs go to ranks behind it. (Zero Bubble, section 4: the validation comes
    before the first backward.)
    """
    order = rank_order(schedule.placement)
    place = {rank: at for at, rank in enumerate(order)}
    taken = takers(schedule)
    ahead: set[Pass] = set()
    counts = [0] * schedule.num_ranks

    for rank in order[:-1]:
        for at, p in enumerate(schedule.passes[rank]):
            goes = (place[schedule.rank_of(taker)] for taker in taken.get(p, ()))
            if (
                (rank, at) in schedule.together
                or p.kind != F
                or not ahead.issuperset(schedule.predecessors(p))
                or min(goes, default=inf) < place[rank]
            ):
                break
            ahead.add(p)
            counts[rank] += 1
    return tuple(counts)


def passes_run_ahead(schedule: Schedule, counts: Sequence[int], ranks_ahead: int) -> set[Pass]:
    """Return the passes that run ahead if the first `ranks_ahead` ranks of the chain do.

    `counts` are those of `passes_ahead`.
    """
    early = rank_order(schedule.placement)[:ranks_ahead]
    return {p for rank in early for p in schedule.passes[rank][: counts[rank]]}


def split(program: Program, ahead: Set[Pass]) -> tuple[Program, Program]:
    """Return a program in two: what runs ahead, with all that it receives of it, and the rest.

    Both are in the order of the whole one, and so are the messages from one rank to another: those
    that are sent ahead are the first.
    """
    first: list[Instruction] = []
    rest: list[Instruction] = []
    latest: Pass | None = None
    for instruction in program:
        if isinstance(instruction, Pass):
            latest = instruction
        elif isinstance(instruction, Join):
            latest = instruction.passes[0]
        if isinstance(instruction, Receive) or (
            isinstance(instruction, Send) and instruction.saved
        ):
            belongs = instruction.producer in ahead
        elif isinstance(instruction, Exchange):
            belongs = all(p in ahead for p in instruction.producers)
        else:
            belongs = latest in ahead
        (first if belongs else rest).append(instruction)
    return tuple(first), tuple(rest)
