"""Times of copies to the host and back: a comb of slots on each rank's copy engine.

(Wan et al., PipeOffload, arXiv 2503.01328: one copy stream, alternate directions; of two ranks on
one switch, one sends out while the other reads in.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from megatron_zbpp.analysis.lifetimes import lifetimes
from megatron_zbpp.ir import Pass, Schedule
from megatron_zbpp.ir.graph import HOST, TRANSFERS
from megatron_zbpp.techniques.offload.graph import offload

Span = tuple[float, float]
_SLACK = 1e-9  # of times that were added up


@dataclass(frozen=True)
class Comb:
    """Slots of one length: one out, one in, and so on.

    Attributes:
        origin: where the first, one out, begins.
        length: of a slot: one way of one activation.
    """

    origin: float
    length: float

    def out(self, at: int) -> Span:
        """Return the slot out of that number."""
        return self.origin + 2 * at * self.length, self.into(at)[0]

    def into(self, at: int) -> Span:
        """Return the slot in of that number: behind the one out."""
        start = self.origin + (2 * at + 1) * self.length
        return start, start + self.length

    def first_out(self, time: float) -> int:
        """Return the number of the first slot out that begins at `time` or later."""
        return max(0, ceil((time - self.origin) / (2 * self.length) - _SLACK))

    def last_in(self, time: float) -> int:
        """Return the number of the last slot in that ends at `time` or before; negative: none."""
        return floor((time - self.origin) / (2 * self.length) - 1 + _SLACK)


def with_transfers(
    schedule: Schedule,
    spans: Sequence[Sequence[Span]],
    stages: Collection[int],
    length: float,
    margin: float,
    pairs: bool = True,
    goes: Callable[[Pass], bool] = lambda forward: True,
) -> Schedule:
    """Return `schedule` with O and L of what has time to go and to return: see `ir.graph.Hold`.

    O stands where its memory is gone, L where memory is taken for what comes back: at the planned
    times, and before passes that start just then. Idle slots stay idle.

    Args:
        schedule: without copies.
        spans: planned, per rank, of its passes.
        stages: whose activations may go.
        length: of a slot: the longest way of one activation, in the unit of `spans`.
        margin: time by which an activation is to be back before it is needed.
        pairs: whether of ranks 2i and 2i + 1 one sends out while the other reads in.
        goes: whether the activation of a forward of `stages` may go; others stay.
    """
    graph = offload(schedule.graph, stages)
    made = replace(schedule, graph=graph, together=frozenset(), phases=())
    orders: list[tuple[Pass, ...]] = []
    together: set[tuple[int, int]] = set()
    for rank, comb in enumerate(_combs(spans, length, pairs)):
        order, own = schedule.passes[rank], spans[rank]
        lives = _lives(order, own, stages)
        going = transfers(comb, {p: life for p, life in lives.items() if goes(p)}, margin)
        placed = [*_placed(schedule, rank, own), *_copies(going)]
        found = tuple(p for _, p in sorted(placed, key=lambda entry: entry[0]))
        orders.append(found)
        at = {p: place for place, p in enumerate(found)}
        together |= {(rank, at[order[k]]) for r, k in schedule.together if r == rank}
    return replace(made, passes=tuple(orders), together=frozenset(together))


def _lives(
    order: Sequence[Pass], spans: Sequence[Span], stages: Collection[int]
) -> dict[Pass, Span]:
    return {
        life.forward: (spans[life.first][1], spans[life.last][0])
        for life in lifetimes(order, stages)
    }


_When = tuple[float, int]  # and where of several at one time


def _placed(schedule: Schedule, rank: int, spans: Sequence[Span]) -> Iterator[tuple[_When, Pass]]:
    when = 0.0
    for at, (p, (start, _)) in enumerate(zip(schedule.passes[rank], spans, strict=True)):
        when = when if (rank, at - 1) in schedule.together else start
        yield (when, 2), p


def _copies(going: Mapping[Pass, tuple[Span, Span]]) -> Iterator[tuple[_When, Pass]]:
    """Yield O at its end and L at its start: memory is given back before it is taken."""
    for p, (out, into) in going.items():
        yield (out[1], 0), p._replace(kind=TRANSFERS[HOST].out)
        yield (into[0], 1), p._replace(kind=TRANSFERS[HOST].back)


def _combs(spans: Sequence[Sequence[Span]], length: float, pairs: bool) -> list[Comb]:
    """Return the comb of each rank, from the end of its first F on."""
    made: list[Comb] = []
    for rank, own in enumerate(spans):
        first = spans[rank - rank % 2][0] if pairs else own[0]
        made.append(Comb(first[1] + (length if pairs and rank % 2 else 0.0), length))
    return made


def transfers(
    comb: Comb, lives: Mapping[Pass, Span], margin: float
) -> dict[Pass, tuple[Span, Span]]:
    """Return the slots of each F whose activation goes; what has no time for both ways stays.

    Outs take the first free slots, from left to right; ins the last ones, from right to left.

    Args:
        comb: of the rank.
        lives: of each F whose activation may go: its end, and when it is needed.
        margin: time between its being back and that.
    """
    least = 2 * comb.length + margin - _SLACK
    going = {p: life for p, life in lives.items() if life[1] - life[0] >= least}
    outs: dict[Pass, int] = {}
    ins: dict[Pass, int] = {}
    free = 0
    for p, (end, _) in sorted(going.items(), key=lambda item: item[1][0]):
        outs[p] = max(free, comb.first_out(end))
        free = outs[p] + 1
    latest = sys.maxsize
    for p, (_, needed) in sorted(going.items(), key=lambda item: -item[1][1]):
        slot = min(latest, comb.last_in(needed - margin))
        if slot >= outs[p]:  # else it stays, and takes no slot from others
            ins[p] = slot
            latest = slot - 1
    return {p: (comb.out(outs[p]), comb.into(ins[p])) for p in ins}
