"""A schedule in the making: passes put one after another, with a clock per rank.

For the families whose order is no closed form but depends on when inputs arrive.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_zbpp.ir import BW, B, F, Pass, Placement, Schedule, W

if TYPE_CHECKING:
    from megatron_zbpp.planning.costs import Costs

_ROUNDING = 1e-9  # relative: three thirds of an activation are one


def within(amount: float, limit: float) -> bool:
    """Whether `amount` is at most `limit`, but for rounding."""
    return amount <= limit * (1 + _ROUNDING)


@dataclass(frozen=True)
class EqualCosts:
    """Stands in for `Costs` where there are none: F, B and W of a stage take 1 each, messages 0.

    A full rank holds one activation a microbatch, all of it until the end of W.
    """

    placement: Placement
    edge: float = 0.0

    def time(self, kind: str, stage: int) -> float:
        return 2.0 if kind == BW else 1.0

    @cached_property
    def activation(self) -> tuple[float, ...]:
        return tuple(1 / len(self.placement.stages(rank)) for rank in self.placement.ranks)

    @property
    def retained(self) -> tuple[float, ...]:
        return self.activation


class Draft:
    """Passes put so far, and what follows from them.

    The caller puts a pass only after what it depends on, and a microbatch after those before it.

    Attributes:
        costs: those given, or equal ones.
        clock: per rank, the end of its last pass.
        idle: per rank, time lost since its first pass.
        held: per rank, activations held.
        pending: per rank, the W passes whose B is put and which are not, oldest first.
        orders: per rank, the passes.
    """

    def __init__(
        self, placement: Placement, num_microbatches: int, costs: Costs | None = None
    ) -> None:
        num_ranks = placement.num_ranks
        self.placement = placement
        self.num_microbatches = num_microbatches
        self.costs = costs or EqualCosts(placement)
        self.clock = [0.0] * num_ranks
        self.idle = [0.0] * num_ranks
        self.held = [0.0] * num_ranks
        self.pending: list[deque[Pass]] = [deque() for _ in range(num_ranks)]
        self.orders: list[list[Pass]] = [[] for _ in range(num_ranks)]
        self._started = [0.0] * num_ranks
        self._sent: dict[tuple[bool, int, int], tuple[float, int]] = {}

    def arrival(self, p: Pass) -> float:
        """When what `p` needs is on its rank; infinite while that is not put."""
        kind, stage, microbatch = p
        if kind == W:
            return 0.0  # its B ran on this rank
        if kind == F:
            key = (True, stage - 1, microbatch)
            if stage == 0:
                return 0.0
        elif stage == self.placement.num_stages - 1:
            key = (True, stage, microbatch)
        else:
            key = (False, stage + 1, microbatch)
        end, rank = self._sent.get(key, (math.inf, -1))
        return end if rank == self.placement.ranks[stage] else end + self.costs.edge

    def has_room(self, stage: int, amount: float, limit: float) -> bool:
        """Whether the rank of `stage` may hold `amount` more and stay within `limit`."""
        held = self.held[self.placement.ranks[stage]]
        return within(held + amount, limit)

    def put(self, p: Pass, not_before: float = 0.0) -> float:
        """Appends `p` to its rank's order, as early as it may start; returns its end."""
        kind, stage, microbatch = p
        rank = self.placement.ranks[stage]
        start = max(self.clock[rank], self.arrival(p), not_before)
        if self.orders[rank]:
            self.idle[rank] += start - self.clock[rank]
        else:
            self._started[rank] = start
        end = self.clock[rank] = start + self.costs.time(kind, stage)
        self.orders[rank].append(p)
        full, kept = self.costs.activation[stage], self.costs.retained[stage]
        self.held[rank] += {F: full, B: kept - full, W: -kept, BW: -full}[kind]
        if kind == W:
            self.pending[rank].popleft()
        else:
            self._sent[kind == F, stage, microbatch] = end, rank
        if kind == B:
            self.pending[rank].append(Pass(W, stage, microbatch))
        return end

    @property
    def makespan(self) -> float:
        return max(self.clock)

    @property
    def window(self) -> float:
        """Longest span of one rank, from the start of its first pass to the end of its last."""
        return max(end - start for start, end in zip(self._started, self.clock, strict=True))

    def schedule(self, name: str) -> Schedule:
        return Schedule.of(name, self.placement, self.num_microbatches, self.orders)
