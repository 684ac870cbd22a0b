"""Activations on the host between F and B (PipeOffload, arXiv 2503.01328).

`offload` makes copies out behind F, and back before B, of a graph; to a partner, too, for `evict`.
The others put them into any schedule: what lives longest goes where it has time to return.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, floor, gcd
from operator import itemgetter

from megatron_zbpp.analysis.memory import lifetimes
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import B, F, Pass, Placement, Schedule, Task, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import (
    COPY,
    DEVICE,
    HOST,
    KV,
    KV_GRADIENT,
    PARTNER,
    TRANSFERS,
    Graph,
    Hold,
    Kind,
    Need,
    R,
    Transfers,
)
from megatron_zbpp.ir.techniques import instead, known_stages, made_of
from megatron_zbpp.schedules.construct.building_blocks import Slots, repeat
from megatron_zbpp.schedules.construct.building_blocks import orders as orders_of
from megatron_zbpp.techniques import Amount, chunks_of
from megatron_zbpp.techniques.base import (
    Technique,
    copy_ratio,
    lack_of_times,
    way_by_copies,
    with_copies,
)
from megatron_zbpp.techniques.composition import require_goes_with
from megatron_zbpp.techniques.slices.place import in_slices

_WORDS = {
    HOST: Transfers('offload', 'load'),
    PARTNER: Transfers('eviction to a partner', 'taking back'),
}


def offload(graph: Graph, stages: Iterable[int], to: str = HOST) -> Graph:
    """Move what forwards of `stages` hold out after F, and back before B.

    (PipeOffload, arXiv 2503.01328; to a partner: BPipe, ICML 2023.) A microbatch may stay: then a
    schedule has neither pass of it. To the host by O and L, to the partner, the rank that has room,
    by E and K.
    """
    if to not in TRANSFERS:
        raise ValueError(f'offload to {to!r}: give {HOST!r} or {PARTNER!r}')
    out, back = TRANSFERS[to]
    stages = known_stages(graph, stages)
    needs, holds = dict(graph.needs), dict(graph.holds)
    for task in [t for t in graph.needs if t.kind == F and t.stage in stages]:
        away, here = task._replace(kind=out), task._replace(kind=back)
        if any(task._replace(kind=ways.out) in graph.needs for ways in TRANSFERS.values()):
            raise ValueError(f'stage {task.stage} is moved already: name it once')
        # B, or R where that comes first
        users = [user for user, _ in graph.feeds[task] if user.stage == task.stage]
        users = [user for user in users if user.kind != F]
        needs[away], needs[here] = (Need(task),), (Need(away),)
        for user in users:
            needs[user] = instead(needs[user], task, here)
        own = [h for h in holds[task] if h.pool == DEVICE and h.amount not in (KV, KV_GRADIENT)]
        left = Counter({h.amount: h.change for h in own})
        holds[away] = _moved(left, DEVICE, to)
        holds[here] = _moved(left, to, DEVICE)
    kinds = {
        kind: Kind(words, engine=COPY, in_order=False, optional=True)
        for kind, words in zip(TRANSFERS[to], _WORDS[to], strict=True)
    }
    return made_of(graph, 'offload', (stages, to), needs, holds, kinds)


def _moved(amounts: Mapping[str, int], source: str, target: str) -> tuple[Hold, ...]:
    return tuple(
        hold
        for amount, count in amounts.items()
        for hold in (Hold(source, amount, -count), Hold(target, amount, count))
    )


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
    times, and before passes that start just then. Idle slots stay idle. `length` is of a slot: the
    longest way of one activation, in the unit of `spans`; `margin` the time by which an activation
    is to be back before it is needed. With `pairs`, of ranks 2i and 2i + 1 one sends out while the
    other reads in. `goes` says which forwards of `stages` may go.
    """
    orders: list[list[Pass]] = []
    for rank, own in enumerate(spans):
        order = schedule.passes[rank]
        lives = {
            life.forward: (own[life.first][1], own[life.last][0])
            for life in lifetimes(order, stages)
            if goes(life.forward)
        }
        # slots begin at the end of the first F: of a pair, of that of its first rank
        first = spans[rank - rank % 2][0] if pairs else own[0]
        comb = Comb(first[1] + (length if pairs and rank % 2 else 0.0), length)
        placed: list[tuple[float, int, Pass]] = []  # with a time, and where of several at one time
        when = 0.0
        for at, (p, (start, _)) in enumerate(zip(order, own, strict=True)):
            when = when if (rank, at - 1) in schedule.together else start
            placed.append((when, 2, p))
        # O at its end and L at its start: memory is given back before it is taken
        for p, (out, into) in transfers(comb, lives, margin).items():
            placed.append((out[1], 0, p._replace(kind=TRANSFERS[HOST].out)))
            placed.append((into[0], 1, p._replace(kind=TRANSFERS[HOST].back)))
        orders.append([p for *_, p in sorted(placed, key=itemgetter(0, 1))])
    return schedule.reordered(orders, offload(schedule.graph, stages))


def transfers(
    comb: Comb, lives: Mapping[Pass, Span], margin: float
) -> dict[Pass, tuple[Span, Span]]:
    """Return the slots of each F whose activation goes; what has no time for both ways stays.

    Outs take the first free slots, from left to right; ins the last ones, from right to left.
    `lives` has, of each F whose activation may go, its end and when it is needed.
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
    `auto` is what is free: all chunks where k is at most 1, else the share 1/k (section 3.1). k,
    `ratio`, is the time of both ways of an activation over that of its F, B and W; times of O and L
    in the costs count before it. With `pairs`, of ranks 2i and 2i + 1 one sends out while the other
    reads in.
    """
    require_goes_with(schedule, offload.__name__)
    placement = schedule.placement
    costs = with_copies(costs or Costs.uniform(placement), ratio)
    if amount == FREE:
        # chunks of a rank that hide their copies behind passes, the last in part
        share = placement.num_chunks / max(1.0, copy_ratio(costs))
    else:
        share = float(chunks_of(amount, placement.num_chunks, offload.__name__, (FREE,)))
    again = {task.stage for task in schedule.graph.needs if task.kind == R}
    stages: list[int] = []
    for rank in range(placement.num_ranks):
        first = [s for s in placement.stages(rank) if placement.chunk_of(s) < ceil(share)]
        stages += [s for s in first if s not in again] or first

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
    """Return `schedule` with activations of `stages` on the host where they have time to return."""

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


def po(
    num_ranks: int, num_microbatches: int, num_chunks: int = 2, costs: Costs | None = None
) -> Schedule:
    """PO: the building block of GIS-H, once every 3v slots, and nothing moved up.

    Wan et al., PipeOffload, arXiv 2503.01328: chunk c of a rank lives a (v-c)-th of the
    time, so that what lives longest can go first.

        >>> print(grid(po(2, 4), width=76))
        rank 0   0F0  2F0  0F1  2B0  2W0  2F1  0B0  0W0  0F2  2B1  2W1  2F2  0B1…
        rank 1   1F0  3F0  3B0  3W0  1F1  1B0  1W0  3F1  3B1  3W1  1F2  1B1  1W1…

    - Peak memory: about (v+1)/(2v) of p activations.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    ones = (1.0,) * placement.num_stages
    slots = _slots(placement, num_microbatches, costs or Costs.of(ones, ones, ones))
    return Schedule.of('po', placement, num_microbatches, orders_of(slots, placement))


def planned(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    """Return when passes of PO are planned: at slots as long as the longest of them."""
    slot = max(max(costs.times[kind]) for kind in (F, B, W))
    slots = _slots(schedule.placement, schedule.num_microbatches, costs)
    return [
        [(slot * slots[p], slot * slots[p] + costs.time(Task(p.kind, p.stage))) for p in order]
        for order in schedule.passes
    ]


def _slots(placement: Placement, num_microbatches: int, costs: Costs) -> Slots:
    """Return the slot of each pass of PO, no two of a rank in one.

    A microbatch enters every 3v slots. Chunks follow each other by half as many microbatches as
    there are ranks; where stages differ, by so many that the slowest rank has work while all F, or
    all B, go round. Chunks whose slots would collide, where that group and v have a common factor,
    come a slot later each; and a rank later by as much as the next chunk's F on rank 0 can wait, so
    that its B does not.
    """
    d, v = placement.num_ranks, placement.num_chunks
    works = [
        [sum(costs.times[kind][stage] for stage in placement.stages(rank)) for kind in (F, B, W)]
        for rank in range(d)
    ]
    forwards, backwards, _ = (sum(own) for own in zip(*works, strict=True))
    group = (d + 1) // 2
    while group < d and max(map(sum, works)) * group < max(forwards, backwards):
        group += 1
    common = gcd(v, group)
    starts = [3 * (group * c + c * common // v) for c in range(v)]
    slack = min((starts[c] - starts[c - 1] - d for c in range(1, v)), default=d - 1)
    block: dict[tuple[str, int], int] = {}
    for stage, rank in enumerate(placement.only_route):
        chunk, late = stage // d, max(0, min(rank, slack))
        backward = starts[-1] + 3 * d - 2 * (rank + 1) + starts[v - 1 - chunk] + late
        block |= {
            (F, stage): starts[chunk] + rank + late,
            (B, stage): backward,
            (W, stage): backward + 1,
        }
    return repeat(block, 3 * v, num_microbatches)


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
    sizes = num_ranks, num_microbatches, num_slices
    return _offloaded('po-h', sizes, num_chunks, (num_chunks + 1) // 2, costs)


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
    sizes = num_ranks, num_microbatches, num_slices
    return _offloaded('po-f', sizes, num_chunks, num_chunks, costs)


def _offloaded(
    name: str, sizes: tuple[int, int, int], num_chunks: int, moved: int, costs: Costs | None
) -> Schedule:
    """Return PO with each rank's first `moved` chunks on the host, in slots as long as any copy."""
    base = in_slices('po', *sizes, num_chunks=num_chunks, costs=costs)
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
    # of copies that take longer schedules have fewer, and wait less for them
    variants=lambda costs: (
        costs.with_times(**{x: tuple(k * t for t in costs.times[x]) for x in TRANSFERS[HOST]})
        for k in _SLOTS
    ),
    exact='megatron_zbpp.planner.cp_sat:solve_offload',
)
