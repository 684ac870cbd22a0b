"""ZB-1p and ZB-2p: the automatic zero-bubble scheduler, under a memory limit.

What section 3.1 of Zero Bubble (arXiv 2401.10241) says in words, as lines that the code names:

     1  for each of 2 x 2 x 2 choices:                                        (_best)
     2      F of microbatch 0 on all ranks                                    (_warm_up)
     3      on each rank as many more F as memory has room for and as do not
     4          delay its first B, or one that does: choice delay_b
     5      B of microbatch 0 on all ranks, the last rank first
     6      for each further microbatch:                                      (run)
     7          on each rank, if it has F left and all ranks below forward:   (_who_forwards)
     8              no F if it is 2 ahead of the rank below and would only
     9                  hold up the next B: choice skip_f                     (_is_worth)
    10              W while memory has no room for an F                       (_forward)
    11              W while the wait for the input of F is as long as a W,    (_fill)
    12                  or would make this rank the most idle; or in every
    13                  wait: choice fill_all
    14              F
    15          on each rank, the last first: W as in lines 10 to 13; B       (_backward)
    16      all W that are left                                               (_flush)
    17  the shortest, by the longest window of a rank, then by the makespan
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from megatron_zbpp.ir import B, F, Pass, Placement, Schedule, W
from megatron_zbpp.schedules.construct.draft import Draft, within

if TYPE_CHECKING:
    from megatron_zbpp.ir.costs import Costs


def zb_1p(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """ZB-1p: the scheduler's best order for the given times in the memory of 1F1B.

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1. It works in rounds
    of one F and one B a rank, puts Ws where a rank would wait, and tries each of three choices both
    ways; the best is the shortest window, then the shortest makespan.

        >>> print(grid(zb_1p(3, 5), width=76))
        rank 0   0F0  0F1  0F2  0B0  0W0  0F3  0B1  0W1  0F4  0B2  0W2  0B3  0W3…
        rank 1   1F0  1F1  1B0  1F2  1B1  1W0  1F3  1B2  1W1  1F4  1B3  1W2  1B4…
        rank 2   2F0  2B0  2F1  2B1  2F2  2B2  2W0  2F3  2B3  2W1  2F4  2B4  2W2…

    - Bubble: (p-1)(F+B-W), ZB-H1's, where F=B=W and in every row of the paper's table 5, whose
      rates it has to four decimals.
    - Peak memory: `memory_limit`; by default p activations of each rank's own stage, and what one
      B adds where more waits for W than F left.

    Raises:
        ValueError: `memory_limit` does not hold one activation.
    """
    return _best('zb-1p', num_ranks, num_microbatches, costs, memory_limit, num_ranks)


def zb_2p(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """ZB-2p: the same scheduler with twice the memory, enough for nearly no bubble in any window.

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1.

        >>> print(grid(zb_2p(3, 6), width=76))
        rank 0   0F0  0F1  0F2  0F3  0F4  0B0  0F5  0W0  0B1  0W1  0B2  0W2  0B3…
        rank 1   1F0  1F1  1F2  1B0  1F3  1B1  1F4  1B2  1F5  1B3  1W0  1B4  1W1…
        rank 2   2F0  2B0  2F1  2B1  2F2  2B2  2F3  2B3  2F4  2B4  2F5  2B5  2W0…

    - Bubble: 0 in each rank's window where F=B=W and m >= 2p; about 0 for other times and m >= 3p
      or so, the rates of the paper's table 5 to four decimals. The makespan, as ranks start one
      after another, is ZB-1p's where F=B=W.
    - Peak memory: `memory_limit`; by default 2p activations of each rank's own stage, and what one
      B adds where more waits for W than F left.

    Raises:
        ValueError: `memory_limit` does not hold one activation.
    """
    return _best('zb-2p', num_ranks, num_microbatches, costs, memory_limit, 2 * num_ranks)


class _Choices(NamedTuple):
    """The choices that the paper leaves open and tries both ways."""

    delay_b: bool
    fill_all: bool
    skip_f: bool


def _best(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None,
    memory_limit: float | None,
    activations: int,
) -> Schedule:
    """Return the draft with the shortest window over all choices, then the shortest makespan."""
    drafts: list[Draft] = []
    for choices in product((False, True), repeat=3):  # line 1
        draft = Draft(Placement.loop(num_ranks), num_microbatches, costs)
        _Scheduler(draft, memory_limit, activations, _Choices(*choices)).run()
        drafts.append(draft)
    shortest = min(draft.window for draft in drafts)  # line 17
    best = (draft for draft in drafts if within(draft.window, shortest))
    return min(best, key=lambda draft: draft.makespan).schedule(name)


class _Scheduler:
    """Fills a draft of a loop placement, where rank and stage are the same number."""

    def __init__(
        self, draft: Draft, memory_limit: float | None, activations: int, choices: _Choices
    ) -> None:
        self.draft = draft
        self.costs = draft.costs
        self.activation = draft.costs.amounts['activation']
        self.choices = choices
        self.p = draft.placement.num_ranks
        self.m = draft.num_microbatches
        held = zip(self.activation, self.costs.amounts['retained'], strict=True)
        self.rises = [max(0.0, kept - full) for full, kept in held]  # by a B, until its W
        self.limits = [
            activations * activation + rise if memory_limit is None else memory_limit
            for activation, rise in zip(self.activation, self.rises, strict=True)
        ]
        self.forwards = [0] * self.p  # per rank, F passes put

    def run(self) -> None:
        """Run the warm-up, a round for each further B, and the Ws that are left."""
        self._warm_up()
        for microbatch in range(1, self.m):  # line 6
            chosen = self._who_forwards()
            for rank in range(self.p):
                if chosen[rank]:
                    self._forward(rank)
            for rank in reversed(range(self.p)):  # line 15
                self._backward(rank, microbatch)
        for rank in range(self.p):  # line 16
            self._flush(rank)

    def _warm_up(self) -> None:
        """Run F of microbatch 0, as many more as come before the first B, and B of microbatch 0."""
        for rank in range(self.p):  # line 2
            self._forward(rank)
        counts = self._warm_up_counts()
        for rank in range(self.p):  # lines 3 and 4
            while self.forwards[rank] < counts[rank]:
                self._forward(rank)
        for rank in reversed(range(self.p)):  # line 5
            self.draft.put(Pass(B, rank, 0))

    def _warm_up_counts(self) -> list[int]:
        counts = [1] * self.p
        first_b = self.draft.clock[-1]  # when the gradient for the last rank's first B is there
        for rank in reversed(range(self.p)):
            now, time = self.draft.clock[rank], self._time(F, rank)
            more = 0.0
            while counts[rank] < self.m and self._has_room(rank, more):
                if not (now < first_b if self.choices.delay_b else within(now + time, first_b)):
                    break
                now += time
                more += self.activation[rank]
                counts[rank] += 1
            edge = self.costs.edge(rank, rank - 1, (rank, rank - 1))
            first_b = max(now, first_b) + self._time(B, rank) + edge
        for rank in range(1, self.p):  # a rank stays ahead of the one below, while it has more
            ahead = counts[rank - 1] if counts[rank - 1] == self.m else counts[rank - 1] - 1
            counts[rank] = max(1, min(counts[rank], ahead))
        return counts

    def _who_forwards(self) -> list[bool]:
        chosen = [count < self.m for count in self.forwards]  # line 7
        for rank in reversed(range(self.p - 1)):
            below = self.forwards[rank + 1]
            # lines 8 and 9
            if self.choices.skip_f and self.forwards[rank] >= below + 2:
                chosen[rank] = chosen[rank] and self._is_worth(rank)
            chosen[rank] = chosen[rank] and (chosen[rank + 1] or below == self.m)
        return chosen

    def _is_worth(self, rank: int) -> bool:
        now, below = self.draft.clock[rank], rank + 1
        next_b = self.draft.clock[below] + self.costs.edge(below, rank, (below, rank))
        next_b += self._time(F, below) + self._time(B, below)
        if now >= next_b:
            return False
        weights = 0  # that must run to make room for the F
        while weights < len(self.draft.pending[rank]) and not self._has_room(
            rank, -weights * self.costs.amounts['retained'][rank]
        ):
            weights += 1
        end = now + weights * self._time(W, rank) + self._time(F, rank)
        return within(end, next_b) or not self._may_idle(rank, next_b - now)

    def _forward(self, rank: int) -> None:
        """Put the next F of `rank`, after the Ws that make room for it and fill its wait."""
        pending = self.draft.pending[rank]
        while not self._has_room(rank):  # line 10
            if not pending:
                raise ValueError(
                    f'memory_limit {self.limits[rank]} is too small for rank {rank}: give at least '
                    f'the {self.activation[rank] + self.rises[rank]} of one activation'
                )
            self.draft.put(pending[0])
        p = Pass(F, rank, self.forwards[rank])
        self._fill(p)
        self.draft.put(p)  # line 14
        self.forwards[rank] += 1

    def _backward(self, rank: int, microbatch: int) -> None:
        if rank == 0 and self.forwards[0] == self.m:
            self._flush(0)
        p = Pass(B, rank, microbatch)
        pending = self.draft.pending[rank]
        while pending and not self.draft.has_room(rank, self.rises[rank], self.limits[rank]):
            self.draft.put(pending[0])
        self._fill(p)
        self.draft.put(p)

    def _fill(self, p: Pass) -> None:
        """Put Ws while the rank would wait for the input of `p`; a longer one only if need be."""
        rank = p.stage
        pending = self.draft.pending[rank]
        while pending:
            wait = self.draft.arrival(p) - self.draft.clock[rank]
            if wait <= 0:
                return
            too_long = self._time(W, rank) > wait  # lines 11 to 13
            if too_long and not self.choices.fill_all and self._may_idle(rank, wait):
                return
            self.draft.put(pending[0])

    def _flush(self, rank: int) -> None:
        pending = self.draft.pending[rank]
        while pending:
            self.draft.put(pending[0])

    def _may_idle(self, rank: int, time: float) -> bool:
        return within(self.draft.idle[rank] + time, max(self.draft.idle))

    def _time(self, kind: str, rank: int) -> float:
        return self.draft.duration(kind, rank)

    def _has_room(self, rank: int, more: float = 0.0) -> bool:
        """Check that `rank`, with `more` activations than now, has room for one more and its B."""
        amount = self.activation[rank] + more + self.rises[rank]
        return self.draft.has_room(rank, amount, self.limits[rank])
