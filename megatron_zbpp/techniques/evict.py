"""Eviction of any schedule: what a rank has no room for waits in the memory of its partner.

BPipe (ICML 2023) does so for 1F1B; here the order is any, and so is the limit of each rank. What
goes is away from behind the pass after its F until before the pass before the one that takes it: so
each way has a pass to hide behind. As few go as bring a rank to its limit and its partner not above
its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from megatron_zbpp.analysis.memory import highest, lifetimes
from megatron_zbpp.ir import F, Pass, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import PARTNER, TRANSFERS, compiled
from megatron_zbpp.techniques.base import Technique, lack_of_times, way_by_copies
from megatron_zbpp.techniques.composition import require_goes_with
from megatron_zbpp.techniques.offload import offload
from megatron_zbpp.techniques.slices.place import in_slices

_RESOLUTION = 1e-9  # of amounts, which are rounded
_WIDTH = 16  # choices that the search for the fewest keeps


def with_eviction(
    schedule: Schedule, stages: Collection[int], costs: Costs, limits: Sequence[float]
) -> Schedule:
    """Return `schedule` with activations of `stages` on partners where a rank holds too much.

    It is `schedule` itself where no rank does. A rank that is its own partner evicts nothing.
    """
    require_goes_with(schedule, 'evict')
    held = highest(schedule, costs)
    placement = schedule.placement
    owns = [_Order(schedule, rank, stages, costs) for rank in range(len(limits))]
    gone: list[frozenset[Pass]] = []
    for rank, limit in enumerate(limits):
        partner = placement.partner(rank)
        room = limits[partner] - max(held[partner], default=0.0)
        alone = partner == rank
        gone.append(frozenset[Pass]() if alone else _leaving(owns[rank], held[rank], limit, room))
    moved = sorted({forward.stage for own in gone for forward in own})
    if not moved:
        return schedule
    orders = (order.with_copies(own) for order, own in zip(owns, gone, strict=True))
    return schedule.reordered(orders, offload(schedule.graph, moved, PARTNER))


class _Life(NamedTuple):
    """The life of an activation: between two places of `_Order.units`."""

    first: int  # of its F
    last: int  # of the pass that takes it: B, or R where that comes first
    amount: float  # of memory

    @property
    def away(self) -> range:
        """Places at which it can be elsewhere."""
        return range(self.first + 2, self.last - 1)


class _Order:
    """The order of one rank, of whose `stages` activations may go."""

    def __init__(
        self, schedule: Schedule, rank: int, stages: Collection[int], costs: Costs
    ) -> None:
        copies = compiled(schedule.graph).on_copy_engines
        self._order = order = schedule.passes[rank]
        self._copies = copies
        # places where something begins to compute; of passes that run as one, of the first
        self.units = [
            at
            for at, p in enumerate(order)
            if p.kind not in copies and (rank, at - 1) not in schedule.together
        ]
        begins = set(self.units)
        unit = list(accumulate((at in begins for at in range(len(order))), initial=-1))[1:]
        change = costs.changes(schedule.graph)
        self.lives: dict[Pass, _Life] = {}
        for p, first, last in lifetimes(order, stages, copies):
            life = _Life(unit[first], unit[last], change.get((F, p.stage, p.slice), 0.0))
            if life.away and life.amount > 0:
                self.lives[p] = life

    def most(self, held: Sequence[float]) -> list[float]:
        """Return the most that is held while each unit runs, and then until the next one begins."""
        ends = [*self.units[1:], len(self._order)]
        return [max(held[max(0, a - 1) : b]) for a, b in zip(self.units, ends, strict=True)]

    def with_copies(self, gone: Collection[Pass]) -> Iterator[Pass]:
        """Yield the order with E where memory is free, K where it is taken again."""
        leaving: dict[int, list[Pass]] = defaultdict(list)
        coming: dict[int, list[Pass]] = defaultdict(list)
        out, back = TRANSFERS[PARTNER]
        for forward in gone:
            life = self.lives[forward]
            leaving[life.first + 1].append(forward._replace(kind=out))
            coming[life.last - 1].append(forward._replace(kind=back))
        ends = [*self.units[1:], len(self._order)]
        for place, (start, end) in enumerate(zip(self.units, ends, strict=True)):
            yield from coming[place]
            own = self._order[start:end]
            yield from (p for p in own if p.kind not in self._copies)
            yield from leaving[place]
            yield from (p for p in own if p.kind in self._copies)


_Away = tuple[tuple[Pass, _Life], ...]
_Choice = Callable[[_Life, Sequence[_Life]], tuple[int, int]]


def _leaving(order: _Order, held: Sequence[float], limit: float, room: float) -> frozenset[Pass]:
    """Return the forwards whose activations go: as few as can be within the partner's room."""
    most = order.most(held)
    if max(most, default=0.0) <= limit + _RESOLUTION:
        return frozenset()
    fewest = _relieved(order.lives, most, limit, _latest)
    if _stored([order.lives[p] for p in fewest]) <= room + _RESOLUTION:
        return fewest
    # the fewest of which the partner stores at most `room`
    within = [_spread(order.lives, most, limit, room)]
    if within[0] is None or len(within[0]) != len(fewest):
        other = _searched(order.lives, most, limit, room)
        # a choice may overlap with what was away before
        if other is not None and _stored([order.lives[p] for p in other]) <= room + _RESOLUTION:
            within.append(other)
    found = [gone for gone in within if gone is not None]
    if found:
        return min(found, key=len)
    ways = [fewest, _relieved(order.lives, most, limit, _apart)]
    return min(ways, key=lambda gone: (_stored([order.lives[p] for p in gone]), len(gone)))


def _searched(
    lives: Mapping[Pass, _Life], most: Sequence[float], limit: float, room: float
) -> frozenset[Pass] | None:
    """Return the fewest that a beam search from place to place finds; None: it finds none."""
    beam: dict[_Away, frozenset[Pass]] = {(): frozenset()}
    for place in range(len(most)):
        if most[place] <= limit + _RESOLUTION:
            continue
        free = [(p, life) for p, life in lives.items() if place in life.away]
        found: dict[_Away, frozenset[Pass]] = {}
        todo = list(beam.items())
        while todo:
            away, gone = todo.pop()
            relief = sum(life.amount for _, life in away if place in life.away)
            if most[place] - relief <= limit + _RESOLUTION:
                later = tuple((p, life) for p, life in away if life.last - 1 > place)
                if later not in found or len(gone) < len(found[later]):
                    found[later] = gone
                continue
            for p, life in free:
                more = tuple(sorted((*away, (p, life)), key=lambda item: item[1][:2]))
                if p not in gone and _stored([each for _, each in more]) <= room + _RESOLUTION:
                    todo.append((more, gone | {p}))
        reach = {away: sum(life.last for _, life in away) for away in found}
        best = sorted(found.items(), key=lambda item: (len(item[1]), -reach[item[0]]))
        beam = dict(best[:_WIDTH])
    return min(beam.values(), key=len, default=None)


def _spread(
    lives: Mapping[Pass, _Life], most: Sequence[float], limit: float, room: float
) -> frozenset[Pass] | None:
    if not lives:
        return None
    ordered = sorted(lives.items(), key=lambda item: item[1][:2])
    period = max(sum(place in life.away for _, life in ordered) for place in range(len(most)))
    least = min(life.amount for _, life in ordered)
    going = min(period, ceil((max(most) - limit - _RESOLUTION) / least))
    found: list[frozenset[Pass]] = []
    for phase in range(period):
        steps = [(at - phase) % period for at in range(len(ordered))]
        spread = {
            p: life
            for step, (p, life) in zip(steps, ordered, strict=True)
            if (step + 1) * going // period > step * going // period
        }
        gone = set(_relieved(lives, most, limit, _apart, spread))
        left = _left(lives, gone, most)
        for p in sorted(gone, key=lambda p: lives[p].first):
            own = lives[p]
            if all(left[place] + own.amount <= limit + _RESOLUTION for place in own.away):
                gone.remove(p)
                for place in own.away:
                    left[place] += own.amount
        if _stored([lives[p] for p in gone]) <= room + _RESOLUTION:
            found.append(frozenset(gone))
    return min(found, key=len, default=None)


def _left(
    lives: Mapping[Pass, _Life], gone: Collection[Pass], most: Sequence[float]
) -> list[float]:
    left = list(most)
    for p in gone:
        for place in lives[p].away:
            left[place] -= lives[p].amount
    return left


def _relieved(
    lives: Mapping[Pass, _Life],
    most: Sequence[float],
    limit: float,
    choice: _Choice,
    first: Collection[Pass] = (),
) -> frozenset[Pass]:
    """Return forwards, one after the other, until no place is above the limit that can be below."""
    left, gone = _left(lives, first, most), {p: lives[p] for p in first}
    for place in range(len(left)):
        while left[place] > limit + _RESOLUTION:
            away = list(gone.values())
            free = {p: life for p, life in lives.items() if p not in gone and place in life.away}
            if not free:
                break
            forward, life = max(free.items(), key=lambda item: choice(item[1], away))
            gone[forward] = life
            for other in life.away:
                left[other] -= life.amount
    return frozenset(gone)


def _latest(life: _Life, away: Sequence[_Life]) -> tuple[int, int]:
    return life.last, life.first


def _apart(life: _Life, away: Sequence[_Life]) -> tuple[int, int]:
    return min((abs(life.first - other.first) for other in away), default=0), -life.last


def _stored(lives: Sequence[_Life]) -> float:
    """Return the most that the partner stores: from behind F to where memory is taken again."""
    ends = [(life.first + 1, life.amount) for life in lives]
    ends += [(life.last - 1, -life.amount) for life in lives]
    return max(accumulate(amount for _, amount in sorted(ends)), default=0.0)


def bound(num_ranks: int, num_slices: int = 1) -> float:
    """Return the most activations on any rank: ceil((p+2)/2), and n-1 further slices of n."""
    return ((num_ranks + 3) // 2 + num_slices - 1) / num_slices


def b_pipe(num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """BPipe: of pairs (x, p-1-x) the first sends activations to the second, and takes them back.

    Kim et al., BPipe: Memory-Balanced Pipeline Parallelism, ICML 2023. Which microbatches go is a
    search of our own for the fewest: each leaves beside the pass behind its F, and comes back
    beside the pass before its B. (Whether it pays: arXiv 2401.02088.)

        >>> print(grid(b_pipe(4, 4), width=76))
        rank 0   0F0   0F1   0F2   0E1   0F3   0E2   0K1   0BW0  0K2   0BW1  0BW2…
        rank 1   1F0   1F1   1F2   1BW0  1F3   1BW1  1BW2  1BW3
        rank 2   2F0   2F1   2BW0  2F2   2BW1  2F3   2BW2  2BW3
        rank 3   3F0   3BW0  3F1   3BW1  3F2   3BW2  3F3   3BW3

    - Peak memory: ceil((p+2)/2) activations on every rank, what it stores for its partner included.
    """
    plain = in_slices('1f1b', num_ranks, num_microbatches, num_slices)
    limits = [bound(num_ranks, num_slices)] * num_ranks
    found = with_eviction(plain, range(num_ranks), Costs.uniform(plain.placement), limits)
    return replace(found, name='bpipe', phases=())


TECHNIQUE = Technique(
    'evict',
    'to a partner and back',
    graph=offload,
    place=with_eviction,
    lacks=partial(lack_of_times, kinds=TRANSFERS[PARTNER]),
    way=partial(way_by_copies, pool=PARTNER),
    to=PARTNER,
)
