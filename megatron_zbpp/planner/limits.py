"""Limits of activations for each rank: what a limit of memory leaves beside parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, inf

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


def with_room(
    candidates: Sequence[Candidate], limit: Limit, graph: Graphs | None = None
) -> list[Candidate]:
    """Return the candidates on which one microbatch fits: a rank holds its activations together."""
    found: list[Candidate] = []
    refusals: list[tuple[float, str]] = []
    for placement, costs in candidates:
        refusal = _refusal(placement, costs, limit, _least(placement, costs, graph))
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


def _least(placement: Placement, costs: Costs, graph: Graphs | None) -> list[float]:
    """Return, per rank, the smallest limit under which there surely is a schedule (`pattern`)."""
    if graph is not None:
        ranks = range(placement.num_ranks)
        made = graph(placement.num_stages)
        problem = Problem(placement, made.num_slices, costs, (inf,) * len(ranks), graph=made)
        changes = costs.changes(made)
        held = ([changes.get(task, 0.0) for task in problem.in_turns(rank)] for rank in ranks)
        return [max(accumulate(own)) for own in held]
    activation, retained = costs.amounts['activation'], costs.amounts['retained']
    rises = [max(0.0, w - a) for a, w in zip(activation, retained, strict=True)]
    held = map(placement.stages, range(placement.num_ranks))
    return [sum(activation[s] for s in own) + max(rises[s] for s in own) for own in held]


def same_limits(limit: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...]:
    """Return one limit a rank.

    Raises:
        ValueError: not one number, nor one a rank, or a limit that is no amount.
    """
    limits = (
        (inf if limit is None else float(limit),) * num_ranks
        if limit is None or isinstance(limit, (int, float))
        else tuple(map(float, limit))
    )
    if len(limits) != num_ranks:
        raise ValueError(
            f'{len(limits)} memory limits for {num_ranks} ranks: give one number, or one a rank'
        )
    for amount in limits:
        if not amount >= 0:
            raise ValueError(f'memory limit {amount} is not an amount: give a number from 0 up')
    return limits
