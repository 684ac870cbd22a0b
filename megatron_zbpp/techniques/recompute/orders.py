"""Merak and Varuna: pipelines whose last rank runs no forward again."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megatron_zbpp.ir import BW, F, Pass, Placement, Schedule, chain
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import R
from megatron_zbpp.schedules.construct.draft import Draft
from megatron_zbpp.schedules.construct.phases import phases
from megatron_zbpp.techniques.recompute.graph import recompute
from megatron_zbpp.techniques.recompute.place import with_recomputation


def merak(num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Shifted critical path: the last rank recomputes nothing, so the rank before it sets the pace.

    Lai et al., Merak, arXiv 2206.04959 (TPDS 2023). What could be known of it is its abstract and
    what others say of it; what follows is this library's reading, and the formulas are its own. A
    forward of the last rank has its backward right behind it, so that running it again is in vain.
    Without that the last rank is the lightest, and the critical path is the one before it. All
    ranks but the last run one forward more ahead than 1F1B, so that R of a microbatch is done when
    its gradient arrives.

        >>> print(grid(merak(3, 4), width=76))
        rank 0   0F0   0F1   0F2   0F3   0R0   0BW0  0R1   0BW1  0R2   0BW2  0R3…
        rank 1   1F0   1F1   1F2   1R0   1BW0  1F3   1R1   1BW1  1R2   1BW2  1R3…
        rank 2   2F0   2BW0  2F1   2BW1  2F2   2BW2  2F3   2BW3

    - Bubble: (p-2)(F+B+W) beside the mF of the forwards that run again: p-1 ranks of 1F1B. With R
      right before each backward, `1f1b` with `--recompute all` has F more.
    - Peak memory: one activation, and the inputs of p-s+1 microbatches on rank s.
    """
    p, m = num_ranks, num_microbatches
    placement = Placement.loop(p)
    table = [(m, 'F BW', 'steady'), (m, 'BW', 'cool-down')]
    ahead = [p - rank for rank in range(p - 1)] + [0]
    orders = (phases([rank], m, [(ahead[rank], 'F', 'warm-up'), *table]) for rank in range(p))
    plain = Schedule.of('merak', placement, m, orders)
    return with_recomputation(plain, range(p - 1), costs or Costs.uniform(placement))


def varuna(num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Varuna's order: a backward first, R so that it ends as the gradient comes, else a forward.

    Athlur et al., Varuna, arXiv 2111.04007 (EuroSys 2022). The order is found once, by running the
    rules against the clock: a backward whose inputs are there comes first; R starts so that it ends
    when the gradient arrives, and its backward follows it; until then forwards run. No bound
    but m limits forwards ahead, which keep their input only, so a rank whose gradient is late has
    forwards to run where 1F1B waits. The last rank recomputes nothing. At run time the order stays:
    Varuna may also leave it when an input is late, which would change the order of messages.

        >>> print(grid(varuna(3, 4), width=76))
        rank 0   0F0   0F1   0F2   0F3   0R0   0BW0  0R1   0BW1  0R2   0BW2  0R3…
        rank 1   1F0   1F1   1F2   1R0   1BW0  1R1   1BW1  1R2   1BW2  1F3   1R3…
        rank 2   2F0   2BW0  2F1   2BW1  2F2   2BW2  2F3   2BW3

    - Bubble: at most (p-1)(F+B+W), beside the mF of the forwards that run again.
    - Peak memory: one activation, and the inputs of up to m microbatches.
    """
    p, m = num_ranks, num_microbatches
    graph = recompute(chain(p), range(p - 1))
    draft = Draft(Placement.loop(p), m, costs, graph)
    ranks = [_Rank(draft, rank) for rank in range(p)]
    moments = [each.next(ranks) for each in ranks]
    while min(moments)[0] < inf:
        start, _, rank, chosen = min(moments)
        ranks[rank].put(chosen, start)
        for each in ranks[max(0, rank - 1) : rank + 2]:
            moments[each.rank] = each.next(ranks)
    return draft.schedule('varuna')


_Moment = tuple[float, int, int, Pass]  # start, preference, rank, and what starts


@dataclass
class _Rank:
    """A rank while the order is made.

    Attributes:
        draft: of all ranks.
        rank: of them.
        done: of F and of BW, how many have been put.
        ends: of the backwards.
    """

    draft: Draft
    rank: int

    def __post_init__(self) -> None:
        self.done = {F: 0, R: 0, BW: 0}
        self.ends: list[float] = []

    def put(self, chosen: Pass, start: float) -> None:
        """Run a pass from `start` on."""
        end = self.draft.put(chosen, not_before=start)
        self.done[chosen.kind] += 1
        if chosen.kind == BW:
            self.ends.append(end)

    def next(self, ranks: list[_Rank]) -> _Moment:
        now, draft = self.draft.clock[self.rank], self.draft
        backward = Pass(BW, self.rank, self.done[BW])
        end = (inf, 0, self.rank, backward)
        if backward.microbatch == draft.num_microbatches:
            return end
        if (arrival := draft.arrival(backward)) < inf:
            return max(now, arrival), 0, self.rank, backward
        return min([end, *self._again(ranks, now), *self._forward(now)])

    def _again(self, ranks: list[_Rank], now: float) -> list[_Moment]:
        """Return R of the next backward, if its gradient is on its way."""
        at = self.done[BW]
        if self.rank == len(ranks) - 1 or len(ranks[self.rank + 1].ends) <= at:
            return []
        below = self.rank + 1
        edge = self.draft.costs.edge(below, self.rank, (below, self.rank))
        there = ranks[below].ends[at] + edge
        start = max(now, there - self.draft.duration(R, self.rank))
        return [(start, 0, self.rank, Pass(R, self.rank, at))]

    def _forward(self, now: float) -> list[_Moment]:
        at = self.done[F]
        if at == self.draft.num_microbatches:
            return []
        forward = Pass(F, self.rank, at)
        return [(max(now, self.draft.arrival(forward)), 1, self.rank, forward)]
