"""ZB-1p and ZB-2p: the automatic zero-bubble scheduler, under a memory limit."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from megatron_zbpp.ir import B, F, Pass, Placement, Schedule
from megatron_zbpp.schedules.draft import Draft
from megatron_zbpp.schedules.family import Family

if TYPE_CHECKING:
    from megatron_zbpp.planning.costs import Costs


class _Knobs(NamedTuple):
    """What the paper's heuristic leaves open and tries both ways.

    Attributes:
        delay_first_b: in the warm-up, one more F though the first B then waits for it.
        fill_gaps: a W wherever a rank would wait, even if it delays what comes next.
        skip_f: no F where the rank below is two behind and its B would have to wait.
    """

    delay_first_b: bool
    fill_gaps: bool
    skip_f: bool


def zb_1p(p, m, costs=None, memory_limit=None):
    return _best('zb-1p', p, m, costs, memory_limit, p)


def zb_2p(p, m, costs=None, memory_limit=None):
    return _best('zb-2p', p, m, costs, memory_limit, 2 * p)


def _best(name, p, m, costs, memory_limit, activations):
    drafts = []
    for knobs in product((False, True), repeat=3):
        draft = Draft(Placement.loop(p), m, costs)
        limits = [memory_limit or activations * a for a in draft.costs.activation]
        _heuristic(draft, limits, _Knobs(*knobs))
        drafts.append(draft)
    return min(drafts, key=lambda d: (d.window, d.makespan)).schedule(name)


def _heuristic(draft: Draft, limits: list[float], knobs: _Knobs) -> None:
    p, m = draft.placement.num_ranks, draft.num_microbatches
    forwards = _warm_up(draft, limits, knobs)
    for b in range(1, m):
        chosen = _ranks_to_forward(draft, forwards, limits, knobs)
        for rank in range(p):
            if chosen[rank]:
                f = Pass(F, rank, forwards[rank])
                _free(draft, f, limits[rank])
                _fill(draft, f, knobs)
                draft.put(f)
                forwards[rank] += 1
        for rank in reversed(range(p)):
            x = Pass(B, rank, b)
            if rank == 0 and forwards[0] == m:
                while draft.pending[0]:
                    draft.put(draft.pending[0][0])
            _fill(draft, x, knobs)
            draft.put(x)
    for pending in draft.pending:
        while pending:
            draft.put(pending[0])


def _warm_up(draft, limits, knobs):
    p, m = draft.placement.num_ranks, draft.num_microbatches
    costs = draft.costs
    for rank in range(p):
        draft.put(Pass(F, rank, 0))
    counts = [1] * p
    arrival = draft.clock[-1] + costs.time(B, p - 1) + costs.edge
    for rank in reversed(range(p - 1)):
        now = draft.clock[rank]
        f = costs.time(F, rank)
        while counts[rank] < m and (counts[rank] + 1) * costs.activation[rank] <= limits[rank] * (1 + 1e-9):
            if (now if knobs.delay_first_b else now + f) > arrival or (knobs.delay_first_b and now == arrival):
                break
            counts[rank] += 1
            now += f
        arrival = max(now, arrival) + costs.time(B, rank) + costs.edge
    for rank in range(1, p):
        counts[rank] = max(1, min(counts[rank], counts[rank - 1] - (counts[rank - 1] < m)))
    for rank in range(p):
        for i in range(1, counts[rank]):
            draft.put(Pass(F, rank, i))
    for rank in reversed(range(p)):
        draft.put(Pass(B, rank, 0))
    return counts


def _free(draft, f, limit):
    rank = f.stage
    while not draft.fits(f, limit):
        if not draft.pending[rank]:
            raise ValueError(f'memory_limit {limit} is too small for rank {rank}')
        draft.put(draft.pending[rank][0])


def _fill(draft, p, knobs):
    rank = p.stage
    pending = draft.pending[rank]
    while pending:
        gap = draft.arrival(p) - draft.clock[rank]
        if gap <= 0:
            return
        w = draft.costs.time('W', rank)
        if w > gap and not knobs.fill_gaps and draft.idle[rank] + gap <= max(draft.idle):
            return
        draft.put(pending[0])


def _ranks_to_forward(draft, forwards, limits, knobs):
    p, m = draft.placement.num_ranks, draft.num_microbatches
    costs = draft.costs
    chosen = [n < m for n in forwards]
    if knobs.skip_f:
        for rank in range(p - 1):
            if chosen[rank] and forwards[rank] >= forwards[rank + 1] + 2:
                chosen[rank] = _worth(draft, rank, limits)
    for rank in reversed(range(p - 1)):
        # only as far as all below go along, unless they are done
        if forwards[rank + 1] < m:
            chosen[rank] = chosen[rank] and chosen[rank + 1]
    return chosen


def _worth(draft, rank, limits):
    costs = draft.costs
    now = draft.clock[rank]
    arrival = draft.clock[rank + 1] + costs.time(F, rank + 1) + costs.time(B, rank + 1) + costs.edge
    if now >= arrival:
        return False
    over = draft.held[rank] + costs.activation[rank] - limits[rank] * (1 + 1e-9)
    ws = 0
    while over > 0:
        over -= costs.retained[rank]
        ws += 1
    if now + costs.time(F, rank) + ws * costs.time('W', rank) <= arrival:
        return True
    return not (arrival - now <= max(draft.idle) - draft.idle[rank])
