"""BPipe: 1F1B whose first ranks keep some activations on the last ones, which have room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_zbpp.ir import BW, F, Pass, Schedule
from megatron_zbpp.ir.graph import PARTNER
from megatron_zbpp.ir.techniques import TRANSFERS, offload
from megatron_zbpp.schedules.one_f_one_b import one_f_one_b
from megatron_zbpp.schedules.registry import Formula, Sizes, family

_LEAST = 3  # passes between the F and the B of what is evicted


def bound(num_ranks: int) -> int:
    """Return the most activations on any rank: ceil((p+2)/2)."""
    return (num_ranks + 3) // 2


def _most(at: Sizes) -> float:
    return min(bound(at.p), at.m) if at.p > 1 else 1


@family(
    'bpipe',
    summary='1F1B whose first ranks keep activations on the last ones, which have room',
    bubble=Formula('(p-1)(F+B+W)', lambda at: (at.p - 1) * at.S),
    memory=Formula('floor((p+3)/2)', _most, at_most=True),
    source='BPipe, ICML 2023',
    aliases=('memory-balanced-pipeline',),
    moves=True,
)
def b_pipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """BPipe: of pairs (x, p-1-x) the first sends activations to the second, and takes them back.

    Kim et al., BPipe: Memory-Balanced Pipeline Parallelism, ICML 2023. Which microbatch goes when
    is a rule of our own: at most one eviction beside the pass behind its F, one load beside the
    pass before its B. (Whether it pays: arXiv 2401.02088.)

        >>> print(grid(b_pipe(4, 4), width=76))
        rank 0   0F0   0F1   0F2   0E1   0F3   0E2   0K1   0BW0  0K2   0BW1  0BW2…
        rank 1   1F0   1F1   1F2   1BW0  1F3   1BW1  1BW2  1BW3
        rank 2   2F0   2F1   2BW0  2F2   2BW1  2F3   2BW2  2BW3
        rank 3   3F0   3BW0  3F1   3BW1  3F2   3BW2  3F3   3BW3

    - Bubble: (p-1)(F+B+W), 1F1B's.
    - Peak memory: ceil((p+2)/2) activations on every rank, what it stores for its partner included.
    - When: links within a pair are fast and memory is what limits; it promises no speed.
    """
    plain = one_f_one_b(num_ranks, num_microbatches)
    evicting = range(max(0, num_ranks - bound(num_ranks)))
    orders = [
        tuple(_marked(order, evicted(num_ranks, num_microbatches, rank)))
        for rank, order in enumerate(plain.passes)
    ]
    graph = offload(plain.graph, evicting, PARTNER)
    return replace(plain, name='bpipe', graph=graph, passes=tuple(orders), phases=())


def evicted(num_ranks: int, num_microbatches: int, rank: int) -> frozenset[int]:
    """Return the microbatches whose activations `rank` keeps on its partner."""
    most, waits = bound(num_ranks), min(num_ranks - rank, num_microbatches)
    if waits <= most:
        return frozenset()
    order = one_f_one_b(num_ranks, num_microbatches).passes[rank]
    lives = _Lives(order, num_microbatches, most)
    candidates = [lives.repaired(lives.spread(phase, waits)) for phase in range(waits - 2)]
    return min(
        candidates,
        key=lambda found: (max(lives.held(found), rank + 1 + lives.stored(found)), len(found)),
    )


class _Lives:
    """When activations of one stage are on a rank: by the places of its passes."""

    def __init__(self, order: Sequence[Pass], num_microbatches: int, most: int) -> None:
        self.most = most
        self.length = len(order)
        at = {(p.kind, p.microbatch): place for place, p in enumerate(order)}
        self.spans = [(at[F, i], at[BW, i]) for i in range(num_microbatches)]

    def spread(self, phase: int, waits: int) -> set[int]:
        """Return evenly spread microbatches: of every w-2 in a row w-b."""
        period, away = waits - 2, waits - self.most
        found: set[int] = set()
        for i in range(1, len(self.spans) - 1):
            step = (i - phase) % period
            first, last = self.spans[i]
            if (step + 1) * away // period > step * away // period and last - first >= _LEAST:
                found.add(i)
        return found

    def present(self, found: set[int] | frozenset[int]) -> list[int]:
        """Return how many are there during each pass; of the evicted, beside their F and B only."""
        present = [0] * self.length
        for i, (first, last) in enumerate(self.spans):
            for place in range(first, last + 1):
                if i not in found or place <= first + 1 or place >= last - 1:
                    present[place] += 1
        return present

    def held(self, found: set[int] | frozenset[int]) -> int:
        """Return the most that are there."""
        return max(self.present(found))

    def stored(self, found: set[int] | frozenset[int]) -> int:
        """Return the most that the partner stores, from the pass behind F to that before B."""
        stored = [0] * self.length
        for i in found:
            first, last = self.spans[i]
            for place in range(first + 1, last):
                stored[place] += 1
        return max(stored)

    def repaired(self, found: set[int]) -> frozenset[int]:
        """Return more, until at no pass too many are there: those far from others first."""
        while True:
            over = next((t for t, n in enumerate(self.present(found)) if n > self.most), None)
            if over is None:
                return frozenset(found)
            free = list(self._that_can_go(over, found))
            if not free:
                return frozenset(found)
            found = found | {max(free, key=lambda i: min((abs(i - j) for j in found), default=0))}

    def _that_can_go(self, place: int, found: set[int]) -> Iterator[int]:
        for i, (first, last) in enumerate(self.spans):
            if i not in found and first + 1 < place < last - 1:
                yield i


def _marked(order: Sequence[Pass], moved: frozenset[int]) -> Iterator[Pass]:
    """Yield the order with E where memory is free again, K where it is taken for what returns."""
    for place, p in enumerate(order):
        following = order[place + 1] if place + 1 < len(order) else None
        if following is not None and following.kind == BW and following.microbatch in moved:
            yield following._replace(kind=TRANSFERS[PARTNER].back)
        yield p
        before = order[place - 1] if place else None
        if before is not None and before.kind == F and before.microbatch in moved:
            yield before._replace(kind=TRANSFERS[PARTNER].out)
