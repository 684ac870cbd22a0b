"""Passes that may run before it is known whether the optimizer step before them stands.

Each rank steps on what it and the ranks before it know (`optim`), and goes ahead with forwards. One
that must not go ahead stops all behind it, so a pass may run ahead only if nothing it needs comes
from behind. What was sent ahead is received whatever happens: no message of a dropped forward is
ever taken for another.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf

from megatron_zbpp.analysis.lowering import takers
from megatron_zbpp.analysis.program import Exchange, Instruction, Join, Program, Receive, Send
from megatron_zbpp.ir import F, Pass, Placement, Schedule


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

    def may(rank: int, p: Pass) -> bool:
        goes = (place[schedule.rank_of(taker)] for taker in taken.get(p, ()))
        needed = schedule.predecessors(p)
        return p.kind == F and ahead.issuperset(needed) and min(goes, default=inf) >= place[rank]

    for rank in order[:-1]:
        for at, p in enumerate(schedule.passes[rank]):
            if (rank, at) in schedule.together or not may(rank, p):
                break
            ahead.add(p)
            counts[rank] += 1
    return tuple(counts)


def passes_run_ahead(schedule: Schedule, counts: Sequence[int], ranks_ahead: int) -> set[Pass]:
    """Return the passes that run ahead if the first `ranks_ahead` ranks of the chain do.

    Args:
        schedule: any.
        counts: of `passes_ahead`.
        ranks_ahead: how many ranks go ahead.
    """
    early = rank_order(schedule.placement)[:ranks_ahead]
    return {p for rank in early for p in schedule.passes[rank][: counts[rank]]}


def split(program: Program, ahead: Set[Pass]) -> tuple[Program, Program]:
    """Return a program in two: what runs ahead, with all that it receives of it, and the rest.

    Args:
        program: of one rank.
        ahead: the passes that run ahead, of all ranks.

    Returns:
        Two programs, each in the order of the whole one. The messages from one rank to another keep
        theirs, too: those that are sent ahead are the first.
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
