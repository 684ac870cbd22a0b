"""Offload of any schedule: what lives longest goes to the host where it has time to return."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, floor

from megatron_zbpp.analysis.memory import lifetimes
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import B, F, Pass, Schedule, Task, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, TRANSFERS, R
from megatron_zbpp.schedules.pipe_offload import planned, po
from megatron_zbpp.techniques.amounts import Amount, chunks_of
from megatron_zbpp.techniques.base import (
    Technique,
    copy_ratio,
    lack_of_times,
    way_by_copies,
    with_copies,
)
from megatron_zbpp.techniques.composition import require_goes_with
from megatron_zbpp.techniques.offload.graph import offload
from megatron_zbpp.techniques.slices.place import in_slices

Span = tuple[float, float]
_SLACK = 1e-9  # of times that were added up


@dataclass(frozen=True)
class Comb:
    """Slots of one length: one out, one in, and so on."""

    origin: float  # where the first, one out, begins
    length: float  # of a slot: one way of one activation

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


FREE = 'auto'  # as much as hides behind the passes


def offloaded(
    schedule: Schedule,
    amount: Amount,
    costs: Costs | None = None,
    ratio: float = 1.0,
    pairs: bool = True,
) -> Schedule:
    """Return `schedule` with activations of the first chunks of each rank on the host meanwhile.

    Chunks live the longer the earlier they are. (PipeOffload, arXiv 2503.01328.) Of chunks that run
    again it is the input, which is small: it goes only on ranks where all those chunks run again.

    Args:
        schedule: without copies.
        amount: 'half', 'all', or how many chunks of each rank; or 'auto': what is free, all of them
            where k is at most 1, else the share 1/k (PipeOffload, section 3.1).
        costs: of its stages, by which copies are planned; default: F = B = W.
        ratio: k, time of both ways of an activation over that of its F, B and W; where costs have
            times of O and L, these count.
        pairs: whether of ranks 2i and 2i + 1 one sends out while the other reads in.

    Raises:
        ValueError: it has what this does not go with, or an amount that makes no sense.
    """
    require_goes_with(schedule, offload.__name__)
    placement = schedule.placement
    costs = with_copies(costs or Costs.uniform(placement), ratio)
    if amount == FREE:
        share = free_share(costs, placement.num_chunks)
    else:
        share = float(chunks_of(amount, placement.num_chunks, offload.__name__, (FREE,)))
    stages = list(_worth_it(schedule, ceil(share)))

    def goes(forward: Pass) -> bool:
        part = share - placement.chunk_of(forward.stage)
        at = forward.microbatch * schedule.graph.num_slices + forward.slice
        return part >= 1 or floor((at + 1) * part) > floor(at * part)

    moved = with_offload(schedule, stages, costs, pairs, goes)
    return replace(moved, name=f'{schedule.name} + offload {amount}')


def with_offload(
    schedule: Schedule,
    stages: Collection[int],
    costs: Costs,
    pairs: bool = True,
    goes: Callable[[Pass], bool] = lambda forward: True,
) -> Schedule:
    """Return `schedule` with activations of `stages` on the host where they have time to return.

    Args:
        schedule: with no copies of these stages.
        stages: at least one.
        costs: with times of O and L.
        pairs: see `offloaded`.
        goes: whether the activation of a forward of `stages` may go; others stay.
    """

    def longest(kinds: Iterable[str], stages: Iterable[int]) -> float:
        """Return the time of the longest pass, of any slice."""
        slices = schedule.graph.num_slices
        tasks = (Task(*each) for each in product(kinds, stages, range(slices)))
        return max(costs.time(task) * costs.share(task.kind, task, slices) for task in tasks)

    length = longest(TRANSFERS[HOST], stages)
    margin = longest((B,), range(schedule.num_stages))
    on_grid = schedule.name == po.__name__ and not schedule.graph.techniques  # its gaps count
    spans = planned(schedule, costs) if on_grid else simulate(schedule, costs).spans
    return with_transfers(schedule, spans, stages, length, margin, pairs, goes)


def _worth_it(schedule: Schedule, chunks: int) -> Iterator[int]:
    placement = schedule.placement
    again = {task.stage for task in schedule.graph.needs if task.kind == R}
    for rank in range(placement.num_ranks):
        first = [s for s in placement.stages(rank) if placement.chunk_of(s) < chunks]
        yield from [s for s in first if s not in again] or first


def free_share(costs: Costs, num_chunks: int) -> float:
    """Return how many chunks of a rank hide their copies behind passes; the last in part."""
    return num_chunks / max(1.0, copy_ratio(costs))


def po_h(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    costs: Costs | None = None,
    num_slices: int = 1,
) -> Schedule:
    """PO-H: PO, and of each rank's chunks the first half goes to the host between F and B.

    Wan et al., PipeOffload, arXiv 2503.01328: chunks live the longer the earlier they
    are, so half of them hold three quarters of the memory.

        >>> print(grid(po_h(2, 4), width=76))
        rank 0   0F0  0O0  2F0  0L0  0F1  2B0  2W0  0O1  2F1  0B0  0W0  0L1  0F2…
        rank 1   1F0  3F0  3B0  3W0  1F1  1B0  1W0  3F1  3B1  3W1  1F2  1B1  1W1…

    - Bubble: as PO's, and more where the copies take longer than planned.
    - Peak memory: about (v+2)/(8v) of p activations, and what is in transit.
    """
    base = in_slices(
        'po', num_ranks, num_microbatches, num_slices, num_chunks=num_chunks, costs=costs
    )
    return _offloaded('po-h', base, (num_chunks + 1) // 2, costs)


def po_f(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    costs: Costs | None = None,
    num_slices: int = 1,
) -> Schedule:
    """PO-F: PO, and all that has the time goes to the host between F and B.

    Wan et al., PipeOffload, arXiv 2503.01328.

        >>> print(grid(po_f(2, 4), width=76))
        rank 0   0F0  0O0  2F0  0L0  0F1  2B0  2W0  0O1  2F1  0B0  0W0  0L1  0F2…
        rank 1   1F0  3F0  3B0  3W0  1F1  1B0  1W0  3F1  3B1  3W1  1F2  1B1  1W1…

    - Bubble: as PO's, and more where the copies take longer than planned.
    - Peak memory: about 4 activations of a chunk, however many ranks there are.
    """
    base = in_slices(
        'po', num_ranks, num_microbatches, num_slices, num_chunks=num_chunks, costs=costs
    )
    return _offloaded('po-f', base, num_chunks, costs)


def _offloaded(name: str, base: Schedule, moved: int, costs: Costs | None) -> Schedule:
    """Return PO with each rank's first `moved` chunks on the host, in slots as long as any copy."""
    ones = (1.0,) * base.placement.num_stages
    costs = costs or Costs.of(ones, ones, ones)
    told = [time for kind in TRANSFERS[HOST] for time in costs.times.get(kind, ())]
    works = zip(costs.times[F], costs.times[B], costs.times[W], strict=True)
    slot = max(told) if told else max(map(sum, works)) / 2
    costs = costs.with_times(**dict.fromkeys(TRANSFERS[HOST], (slot,) * len(ones)))
    stages = [s for s in range(base.num_stages) if base.placement.chunk_of(s) < moved]
    return replace(with_offload(base, stages, costs), name=name)


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
