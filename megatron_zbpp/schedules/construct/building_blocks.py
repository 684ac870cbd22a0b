"""Building blocks: one microbatch's passes at fixed slots, repeated, then moved up into free slots.

The framework of Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362. A slot
is the time of one F, B or W of a stage; a BW takes two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate, product

from megatron_zbpp.ir import B, Pass, Placement, W, chain
from megatron_zbpp.ir.graph import DEVICE, compiled

Slots = dict[Pass, int]

_PLAIN = chain(1)  # what each kind of pass does, whatever its stage
_WIDTHS = {kind: len(_PLAIN.tasks(kind, 0)) for kind in _PLAIN.kinds}  # in slots


def repeat(block: Mapping[tuple[str, int], int], interval: int, num_microbatches: int) -> Slots:
    """Return `block`, the slots of (kind, stage) of microbatch 0, again each `interval` slots."""
    return {
        Pass(kind, stage, i): slot + interval * i
        for i in range(num_microbatches)
        for (kind, stage), slot in block.items()
    }


def with_weights(slots: Slots, placement: Placement) -> Slots:
    """Return `slots` with the W of each B in the first slot after it that its rank has free."""
    full, ranks = dict(slots), placement.only_route
    rows = _rows(slots, placement)
    for p, slot in sorted(slots.items(), key=lambda item: item[1]):
        if p.kind == B:
            full[p._replace(kind=W)] = rows[ranks[p.stage]].take_after(slot)
    return full


def tighten(
    slots: Slots, placement: Placement, limit: int, start: int = 0, stop: int | None = None
) -> Slots:
    """Return `slots` with passes moved up to the earliest slot they can have, in order of time.

    What takes an activation moves only as far as its rank then holds at most `limit`. `limit` is in
    activations of one stage. Passes before slot `start`, and from slot `stop` on, stay where they
    are.
    """
    moved, ranks = dict(slots), placement.only_route
    rows = _rows(slots, placement)
    needs = _needs(placement.num_stages, frozenset(p.kind for p in slots))
    for p, slot in sorted(slots.items(), key=lambda item: (item[1], item[0].stage)):
        if start <= slot and (stop is None or slot < stop):
            earliest = max((moved[q] + _WIDTHS[q.kind] for q in _before(p, needs)), default=0)
            moved[p] = rows[ranks[p.stage]].move_up(p.kind, slot, earliest, limit)
    return moved


def orders(slots: Slots, placement: Placement) -> list[list[Pass]]:
    """Return, per rank, its passes in order of their slots."""
    ranks = placement.only_route
    result: list[list[Pass]] = [[] for _ in range(placement.num_ranks)]
    for p, _ in sorted(slots.items(), key=lambda item: item[1]):
        result[ranks[p.stage]].append(p)
    return result


@lru_cache(16)
def _needs(
    num_stages: int, kinds: frozenset[str]
) -> dict[tuple[str, int], tuple[tuple[str, int], ...]]:
    graph = chain(num_stages)
    found: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}
    for kind, stage in product(kinds, range(num_stages)):
        own = graph.tasks(kind, stage)
        needs = (need.task for task in own for need in graph.needs[task] if need.task not in own)
        found[kind, stage] = tuple(
            (doer, task.stage) for task in needs for doer in graph.doers[task.kind] if doer in kinds
        )
    return found


def _before(
    p: Pass, needs: Mapping[tuple[str, int], tuple[tuple[str, int], ...]]
) -> Iterator[Pass]:
    for kind, stage in needs[p.kind, p.stage]:
        yield Pass(kind, stage, p.microbatch)
    if p.microbatch:
        yield p._replace(microbatch=p.microbatch - 1)


class _Row:
    """Slots of one rank: which are taken, and how many activations are held in each."""

    def __init__(self, slots: Slots, changes: Mapping[str, int]) -> None:
        # of activations, by kind: taken at its start (positive), or given back at its end
        length = max(slot + _WIDTHS[p.kind] for p, slot in slots.items())
        self.changes = changes
        self.taken = bytearray(length)
        held = [0] * (length + 1)
        for p, slot in slots.items():
            width, change = _WIDTHS[p.kind], changes[p.kind]
            self.taken[slot : slot + width] = b'\1' * width
            held[slot if change > 0 else slot + width] += change
        self.held = list(accumulate(held))

    def take_after(self, slot: int) -> int:
        """Return the first free slot after `slot`, which is now taken."""
        free = self.taken.find(0, slot + 1)
        if free < 0:
            free = len(self.taken)
            self.taken.append(0)
        self.taken[free] = 1
        return free

    def move_up(self, kind: str, slot: int, earliest: int, limit: int) -> int:
        """Move the pass at `slot` to the earliest slot that it can have; return that."""
        width, change = _WIDTHS[kind], self.changes[kind]
        self.taken[slot : slot + width] = bytes(width)
        if change > 0:
            fits = slot
            while fits > earliest and self.held[fits - 1] < limit:
                fits -= 1
            earliest = fits
        best = self.taken.find(bytes(width), earliest)  # at the latest `slot`, now free
        self.taken[best : best + width] = b'\1' * width
        moved = 0 if change > 0 else width
        for at in range(best + moved, slot + moved) if change else ():
            self.held[at] += change
        return best


@lru_cache
def _changes(kinds: frozenset[str]) -> dict[str, int]:
    counts = {kind: compiled(_PLAIN).changes[DEVICE][kind, 0, 0] for kind in kinds}
    given_back = {name for own in counts.values() for name, count in own.items() if count < 0}
    return {
        kind: sum(count for name, count in own.items() if name in given_back)
        for kind, own in counts.items()
    }


def _rows(slots: Slots, placement: Placement) -> list[_Row]:
    changes = _changes(frozenset(p.kind for p in slots))
    ranks = placement.only_route
    of_rank: list[Slots] = [{} for _ in range(placement.num_ranks)]
    for p, slot in slots.items():
        of_rank[ranks[p.stage]][p] = slot
    return [_Row(held, changes) for held in of_rank]
