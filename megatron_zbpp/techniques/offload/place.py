"""Offload of any schedule: what lives longest goes to the host where it has time to return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import ceil, floor

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import B, Pass, Schedule, Task
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, TRANSFERS, R
from megatron_zbpp.schedules.pipe_offload import planned, po
from megatron_zbpp.techniques.amounts import Amount, chunks_of
from megatron_zbpp.techniques.composition import require_goes_with
from megatron_zbpp.techniques.copies import copy_ratio, with_copies
from megatron_zbpp.techniques.offload.comb import with_transfers
from megatron_zbpp.techniques.offload.graph import offload

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
    """Return how many chunks of a rank hide their copies behind the passes; the last one in part.

    Args:
        costs: with times of O and L.
        num_chunks: of a rank.
    """
    return num_chunks / max(1.0, copy_ratio(costs))
