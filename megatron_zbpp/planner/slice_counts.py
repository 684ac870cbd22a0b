"""HOW MANY slices of a sequence: what the best named schedule gains by each number of them.

Each slice more shortens the bubble; but slices take passes and messages of their own, and slices of
few tokens keep no device busy. So: the fewest whose best schedule is hardly longer than any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from megatron_zbpp.planner.budget import OnTime, always
from megatron_zbpp.planner.limits import Candidate, Limit, activation_limits, with_room
from megatron_zbpp.planner.named_schedules import named
from megatron_zbpp.planner.plans import is_small
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.techniques.slices.balance import Attention, balanced, in_parts
from megatron_zbpp.techniques.slices.graph import Slicing

_HARDLY = 0.01  # of a value
_MOST_PASSES = 200_000


class Count(NamedTuple):
    """The best named schedule of a number of slices."""

    sizes: tuple[int, ...]  # tokens of each slice; one: sequences are whole
    name: str  # of the schedule
    value: float  # its makespan or window

    @property
    def slices(self) -> int:
        """How many there are."""
        return len(self.sizes)


def slice_counts(
    candidates: Sequence[Candidate],
    num_microbatches: int,
    length: int,
    attention: Attention,
    *,
    least: int,
    memory_limit: Limit = None,
    objective: str = 'makespan',
    on_time: OnTime = always,
) -> Iterator[Count]:
    """Yield 1, 2, 4, ... balanced slices, each with the best named schedule within the limit.

    Numbers of which none fits are left out.

    Args:
        candidates: placements, with costs of whole sequences.
        num_microbatches: m.
        length: tokens of a sequence.
        attention: what F is made of.
        least: tokens of a slice, as a mean of all.
        memory_limit: see `planner.plans.plan`.
        objective: 'makespan' or 'window'.
        on_time: asked before each number, and where schedules take long to build, before each.

    Raises:
        ValueError: a microbatch does not fit.
    """
    units = num_microbatches * max(3 * each.num_stages for each, _ in candidates)
    best = partial(_best, candidates, num_microbatches, attention, memory_limit, objective, on_time)
    cut = partial(balanced, length=length, attention=attention, costs=candidates[0][1])
    for sizes in doubled(cut, length, least, units):
        found = best(sizes) if len(sizes) == 1 or on_time() else None
        if found is not None:
            yield found


def doubled(
    cut: Callable[[int], tuple[int, ...]], length: int, least: int, units: int
) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of 1, 2, 4, ... slices, as many as there are tokens and time for.

    Args:
        cut: returns the tokens of so many slices.
        length: tokens of a sequence.
        least: tokens of a slice, as a mean of all.
        units: passes of whole sequences.
    """
    yield (length,)
    slices = 2
    while slices * least <= length and slices * units <= _MOST_PASSES:
        try:
            yield cut(slices)
        except ValueError:  # the last ones would have no tokens
            return
        slices *= 2


def _best(
    candidates: Sequence[Candidate],
    num_microbatches: int,
    attention: Attention,
    limit: Limit,
    objective: str,
    on_time: OnTime,
    sizes: tuple[int, ...],
) -> Count | None:
    candidates = [(placement, in_parts(costs, sizes, attention)) for placement, costs in candidates]
    graphs = Slicing(len(sizes), sizes) if len(sizes) > 1 else None
    best: Count | None = None
    for placement, costs in with_room(candidates, limit, graphs):
        limits = activation_limits(limit, placement, costs)
        graph = graphs and graphs(placement.num_stages)
        units = num_microbatches * len(sizes)
        problem = Problem(placement, units, costs, limits, objective, graph)
        for entry in named(problem, always if is_small(problem.num_passes) else on_time)[:1]:
            if best is None or entry.value < best.value:
                best = Count(sizes, entry.name, entry.value)
    return best


def fewest(found: Sequence[Count]) -> Count:
    """Return the first that is hardly longer than the shortest.

    Raises:
        ValueError: there is none at all.
    """
    if not found:
        raise ValueError(
            'no named schedule fits the memory limit, in any number of slices: give --slices a '
            'number, so that one is searched'
        )
    shortest = min(each.value for each in found)
    return next(each for each in found if each.value <= shortest * (1 + _HARDLY))
