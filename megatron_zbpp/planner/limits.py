"""Limits of a search: of its time, in steps that can be repeated, and of what ranks may hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from math import ceil, inf
from typing import TypeVar

from megatron_zbpp.ir import Graph, Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.problem import Problem

Candidate = tuple[Placement, Costs]
Graphs = Callable[[int], Graph]  # of a number of stages
Limit = float | Sequence[float] | None  # one for all ranks, one a rank, or none

_ROUNDING = 1 - 1e-9
_GIB = 2**30


class Bytes(float):
    """An amount that is told in bytes: a limit of all that a rank holds; `:g` tells it in GiB."""

    def __format__(self, spec: str) -> str:
        if spec != 'g':
            return super().__format__(spec)
        return f'{ceil(self / _GIB * 100) / 100:g} GiB'


def question(
    candidate: Candidate,
    num_microbatches: int,
    limit: Limit = None,
    objective: str = 'makespan',
    graph: Graphs | None = None,
) -> Problem:
    """Return the question of orders on a candidate; `limit`: of memory, parameters included."""
    placement, costs = candidate
    made = graph and graph(placement.num_stages)
    units = num_microbatches * (made.num_slices if made else 1)
    limits = activation_limits(limit, placement, costs)
    return Problem(placement, units, costs, limits, objective, made)


def with_room(
    candidates: Sequence[Candidate], limit: Limit, graph: Graphs | None = None
) -> list[Candidate]:
    """Return the candidates on which one microbatch fits: a rank holds its activations together."""
    found: list[Candidate] = []
    refusals: list[tuple[float, str]] = []
    for placement, costs in candidates:
        refusal = _refusal(placement, costs, limit, least_limits(placement, costs, graph))
        if refusal is None:
            found.append((placement, costs))
        else:
            refusals.append(refusal)
    if not found:
        least, what = min(refusals)
        raise ValueError(
            f'{what}: give at least {said(least, limit)}, the least that any of these placements '
            'needs'
        )
    return found


def activation_limits(limit: Limit, placement: Placement, costs: Costs) -> tuple[float, ...]:
    """Return the most activations of each rank: its limit less its parameters."""
    limits = same_limits(limit, placement.num_ranks)
    return tuple(most - taken for most, taken in zip(limits, costs.static(placement), strict=True))


def _refusal(
    placement: Placement, costs: Costs, limit: Limit, least: list[float]
) -> tuple[float, str] | None:
    limits, static = same_limits(limit, placement.num_ranks), costs.static(placement)
    for rank, (most, taken, own) in enumerate(zip(limits, static, least, strict=True)):
        if most - taken >= own * _ROUNDING:
            continue
        needed = max(a + b for a, b in zip(static, least, strict=True))
        below = f'memory limit {said(most, limit)} of rank {rank} is below'
        if not taken:
            return needed, f'{below} {said(own, limit)}, one microbatch'
        beside = '' if taken > most else f' beside {said(own, limit)} of one microbatch'
        return needed, f'{below} {said(taken, limit)} of weights, gradients and optimizer{beside}'
    return None


def said(amount: float, limit: Limit) -> str:
    """Return an amount as the limit was told: in GiB, rounded up, or as a number."""
    first = limit[0] if isinstance(limit, Sequence) else limit
    return f'{Bytes(amount) if isinstance(first, Bytes) else amount:g}'


def least_limits(placement: Placement, costs: Costs, graph: Graphs | None = None) -> list[float]:
    """Return, per rank, the smallest limit under which there surely is a schedule (`pattern`)."""
    if graph is not None:
        problem = question((placement, costs), 1, graph=graph)
        changes = costs.changes(graph(placement.num_stages))
        alone = ([problem.of_slices[queue] for queue in own] for own in problem.turns)
        held = ([changes.get(task, 0.0) for of in own for task in of] for own in alone)
        return [max(accumulate(own)) for own in held]
    activation, retained = costs.amounts['activation'], costs.amounts['retained']
    rises = [max(0.0, w - a) for a, w in zip(activation, retained, strict=True)]
    held = map(placement.stages, range(placement.num_ranks))
    return [sum(activation[s] for s in own) + max(rises[s] for s in own) for own in held]


def same_limits(limit: Limit, num_ranks: int) -> tuple[float, ...]:
    """Return one limit a rank."""
    if limit is None or isinstance(limit, int | float):
        limits = (inf if limit is None else float(limit),) * num_ranks
    else:
        limits = tuple(map(float, limit))
    if len(limits) != num_ranks:
        raise ValueError(
            f'{len(limits)} memory limits for {num_ranks} ranks: give one number, or one a rank'
        )
    for amount in limits:
        if not amount >= 0:
            raise ValueError(f'memory limit {amount} is not an amount: give a number from 0 up')
    return limits


_STEPS_PER_SECOND = 300_000  # one step: about a microsecond of one core of 2024
_STEPS_PER_EFFORT = 450_000  # what CP-SAT does in one of its deterministic seconds
_REPORT_EVERY = 0.5  # seconds

_T = TypeVar('_T')
OnTime = Callable[[], bool]  # whether there is time for more


class Budget:
    """Steps that may still be taken, of which parts can be lent out.

    A clock would let a busy machine plan otherwise than an idle one. So `seconds` are turned into a
    fixed number of steps, what half of them suffice for on a slow core; only a machine that needs
    more than all of them is stopped by the clock, and then `overran` tells that the plan may not
    repeat. What is not counted in steps, such as building named schedules, asks `on_time` between
    its parts.
    """

    def __init__(
        self, seconds: float, report: Callable[[float], None] | None = None, reserve: float = 0.0
    ) -> None:
        """Turn seconds into steps; the clock ends the search `reserve` seconds before the deadline.

        `report` is called now and then with the share that is spent, of steps or of time.
        """
        self.steps = self.left = seconds * _STEPS_PER_SECOND  # that there were, and that there are
        self.overran = False  # whether the clock ended it
        self._parent: Budget | None = None
        self._report = report
        self._reported = time.monotonic()
        self._length = seconds - reserve
        self._deadline = self._reported + self._length

    def split_off(self, share: float) -> Budget:
        """Return a share of what is left; spending it spends of this budget too."""
        part = Budget(0.0)
        part.steps = part.left = self.left * share
        part._parent = self
        return part

    @property
    def effort(self) -> float:
        """The effort that is left, in deterministic seconds of CP-SAT."""
        return max(self.left, 0.0) / _STEPS_PER_EFFORT

    @property
    def seconds(self) -> float:
        """Time to the deadline."""
        return self._deadline - time.monotonic() if self._parent is None else self._parent.seconds

    def spend_effort(self, effort: float, overran: bool) -> None:
        """Spend deterministic seconds of CP-SAT, and tells whether the clock ended it."""
        self.overran = self.overran or overran
        if self._parent is not None:
            self._parent.spend_effort(effort, overran)
        self.left -= effort * _STEPS_PER_EFFORT

    @property
    def spent(self) -> float:
        """Share of the steps that is spent, 0 to 1."""
        return 1 - max(self.left, 0.0) / self.steps if self.steps else 1.0

    def charge(self, steps: float) -> bool:
        """Spend `steps`; False if there were none left."""
        if self.left <= 0:
            return False
        self.left -= steps
        return self.on_time() if self._parent is None else self._parent.charge(steps)

    def on_time(self) -> bool:
        """Return True while there is time, and report; past the deadline no steps are left."""
        if self._parent is not None:
            return self._parent.on_time()
        now = time.monotonic()
        if now > self._deadline:
            self.left, self.overran = 0.0, True
            return False
        if self._report is not None and now > self._reported + _REPORT_EVERY:
            self._reported = now
            self._report(max(self.spent, 1 - (self._deadline - now) / self._length))
        return True

    def turn(self, share: float) -> OnTime:
        """Return a function that tells whether a share of the time left from now is not over.

        What asks it once that is over is cut short by the clock, and `overran` says so.
        """
        end = time.monotonic() + share * self.seconds

        def in_turn() -> bool:
            over = not self.on_time() or time.monotonic() > end
            self.overran = self.overran or over
            return not over

        return in_turn


def by_bound(entries: Iterable[tuple[float, _T]], value: Callable[[], float]) -> Iterator[_T]:
    """Yield entries in the order of their lower bounds, while these are below the known value."""
    for bound, entry in sorted(entries, key=lambda each: each[0]):
        if bound >= value():
            return
        yield entry


def always() -> bool:
    """Return True: there is time for all of it."""
    return True
