"""WHEN: orders that never drain, for so many calls that the last ones show how they go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush

from megatron_zbpp.ir import BW, F, Graph, Pass, Placement, Schedule
from megatron_zbpp.techniques.updates.graph import UPDATE

_TIMES = {F: 1, BW: 2}
_STEADY = 4  # a call of a draft behind which its calls are taken to repeat


def num_calls(num_ranks: int, num_microbatches: int) -> int:
    """Return so many calls that three run all their forwards, however far a rank runs ahead."""
    return 2 * -(-(num_ranks - 1) // num_microbatches) + 3


def without_flush(name: str, graph: Graph, num_microbatches: int) -> Schedule:
    """Return 1F1B that goes on from batch to batch, with a step behind each (PipeDream).

    Rank s runs p-1-s forwards, and then forwards and backwards by turns (arXiv 1806.03377).

    Args:
        name: of the schedule.
        graph: of a stage a rank, that `updating` made.
        num_microbatches: of a batch, which is a call.
    """
    p, m = graph.num_stages, num_microbatches
    total = num_calls(p, m) * m
    orders = (_order(stage, p - 1 - stage, m, total) for stage in range(p))
    return Schedule.of(name, Placement.loop(p), total, orders, graph)


def _order(stage: int, ahead: int, m: int, total: int) -> Iterator[Pass]:
    yield from (Pass(F, stage, j) for j in range(ahead))
    for j in range(total):
        if j + ahead < total:
            yield Pass(F, stage, j + ahead)
        yield Pass(BW, stage, j)
        if (j + 1) % m == 0:
            yield Pass(UPDATE, stage, j)


def in_two_groups(name: str, graph: Graph, num_ranks: int, num_microbatches: int) -> Schedule:
    """Return an order of two chunks a rank, where the first runs a batch ahead (WPipe).

    A free rank takes the first of these that is ready: a forward of its second chunk, a backward of
    it, a forward of its first, a backward of it. A forward waits for the version of its weights,
    and of a chunk at most p microbatches are between F and BW: of the first, which waits for the
    second, 3p.

    Args:
        name: of the schedule.
        graph: of two stages a rank, whose forwards need the steps of one and of no batch before.
        num_ranks: p.
        num_microbatches: of a batch, which is a call.
    """
    draft = _Draft(num_ranks, num_microbatches, num_calls(num_ranks, num_microbatches) + 10)
    placement = Placement.loop(num_ranks, 2)
    return Schedule.of(name, placement, draft.total, draft.orders(), graph)


def in_joint_calls(name: str, graph: Graph, num_ranks: int, num_microbatches: int) -> Schedule:
    """Return an order of two chunks a rank that step together, behind all backwards of a batch.

    Each call has one order, repeated: behind the forwards of its second chunk a rank runs those of
    its first for the next batch (of more than 4p, the first 2p). Of what is ready it takes first a
    backward of its second chunk, then a forward of it, a backward of its first, a forward of that.

    Args:
        name: of the schedule.
        graph: of two stages a rank, whose forwards need the steps of one and of no batch before.
        num_ranks: p.
        num_microbatches: of a batch, which is a call.
    """
    p, m = num_ranks, num_microbatches
    ahead, calls = m if m <= 4 * p else 2 * p, num_calls(p, m) + 2
    draft = _JointDraft(p, m, ahead)
    orders: list[list[Pass]] = []
    for rank, drafted in enumerate(draft.orders()):
        order = [Pass(F, rank, j) for j in range(ahead)]
        at = [i for i, each in enumerate(drafted) if each.kind == UPDATE and each.stage >= p]
        steady = drafted[at[_STEADY - 1] + 1 : at[_STEADY] + 1]
        for later in range(-_STEADY * m, (calls - _STEADY) * m, m):
            moved = (each._replace(microbatch=each.microbatch + later) for each in steady)
            order += [each for each in moved if each.microbatch < calls * m]
        orders.append(order)
    return Schedule.of(name, Placement.loop(p, 2), calls * m, orders, graph)


class _Draft:
    """Runs two chunks a rank against the clock."""

    turns = tuple((half, kind) for half in (1, 0) for kind in (F, BW))  # what comes first

    def __init__(self, num_ranks: int, num_microbatches: int, calls: int) -> None:
        self._p, self._m, self.total = num_ranks, num_microbatches, calls * num_microbatches
        self._ends: dict[Pass, int] = {}
        self._begun = Counter[tuple[str, int]]()  # by kind and stage

    def orders(self) -> list[list[Pass]]:
        """Return the order of each rank."""
        orders: list[list[Pass]] = [[] for _ in range(self._p)]
        busy, wakes = [0] * self._p, [(0, rank) for rank in range(self._p)]
        while wakes:
            now, rank = heappop(wakes)
            taken = self._ready(rank, now) if busy[rank] <= now else None
            if taken is None:
                continue
            self._begun[taken.kind, taken.stage] += 1
            busy[rank] = self._ends[taken] = now + _TIMES[taken.kind]
            orders[rank].append(taken)
            orders[rank] += self._steps(rank, taken)
            for other in range(self._p):
                heappush(wakes, (busy[rank], other))
        return orders

    def _ready(self, rank: int, now: int) -> Pass | None:
        for half, kind in self.turns:
            stage = rank + half * self._p
            p = Pass(kind, stage, self._begun[kind, stage])
            needs = self._needs(p)
            there = (self._ends.get(need, now + 1) <= now for need in needs)
            if p.microbatch < self.total and self._has_room(p) and all(there):
                return p
        return None

    def _steps(self, rank: int, taken: Pass) -> list[Pass]:
        last = taken.kind == BW and (taken.microbatch + 1) % self._m == 0
        return [taken._replace(kind=UPDATE)] if last else []

    def _has_room(self, p: Pass) -> bool:
        held = p.microbatch - self._begun[BW, p.stage]
        return p.kind != F or held < (3 * self._p if p.stage < self._p else self._p)

    def _needs(self, p: Pass) -> list[Pass]:
        kind, stage, j, _ = p
        if kind == BW:
            above = [p._replace(stage=stage + 1)] if stage + 1 < 2 * self._p else []
            return [p._replace(kind=F), *above]
        batch = j // self._m - (stage < self._p)  # whose weights it takes
        weights = [Pass(BW, stage, batch * self._m - 1)] if batch > 0 else []
        return weights + ([p._replace(stage=stage - 1)] if stage else [])


class _JointDraft(_Draft):
    """Runs calls that each end with the steps of both chunks of a rank.

    Args:
        ahead: forwards of the first chunk that a call runs for the next one.
    """

    turns = (1, BW), (1, F), (0, BW), (0, F)

    def __init__(self, num_ranks: int, num_microbatches: int, ahead: int) -> None:
        super().__init__(num_ranks, num_microbatches, _STEADY + 3)
        self._ahead = ahead
        self._calls = [0] * num_ranks  # that have ended

    def _steps(self, rank: int, taken: Pass) -> list[Pass]:
        stages, end = (rank, rank + self._p), (self._calls[rank] + 1) * self._m
        run = [self._begun[kind, stage] for kind in (F, BW) for stage in stages]
        if min(run) < end or run[0] < end + self._ahead:
            return []
        self._calls[rank] += 1
        return [Pass(UPDATE, stage, end - 1) for stage in stages]

    def _has_room(self, p: Pass) -> bool:
        end = (self._calls[p.stage % self._p] + 1) * self._m
        if p.kind == F and p.stage < self._p and self._begun[F, p.stage + self._p] >= end:
            end += self._ahead
        return p.microbatch < end
