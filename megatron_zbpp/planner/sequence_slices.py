"""Slices of sequences: as they are asked for, and how many pay.

Each slice more shortens the bubble; but slices take passes and messages of their own, and slices of
few tokens keep no device busy. So the best number is the fewest whose best named schedule is hardly
longer than any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.cost_sources import Naming
from megatron_zbpp.planner.limits import Candidate, Limit, OnTime, always, question, with_room
from megatron_zbpp.planner.plans import is_small, named
from megatron_zbpp.techniques.composition import techniques_of
from megatron_zbpp.techniques.slices.balance import (
    Attention,
    balanced,
    exchanged,
    fit_attention,
    in_parts,
)
from megatron_zbpp.techniques.slices.graph import (
    Slices,
    Slicing,
    ToFind,
    exchanging_context,
    number_of,
    sized,
    sizes_of,
)

_NO_ATTENTION = Attention()


@dataclass(frozen=True)
class SliceRequest:
    """Slices of a sequence, and the share of attention that makes later ones longer."""

    slices: Slices | None = None  # None: not asked for
    seq_length: int | None = None  # tokens of a sequence
    attention: Attention | Mapping[int, float] = _NO_ATTENTION  # or times of F by tokens
    context_exchange: float | None = None  # time that a pass waits for each slice that moves
    name: Naming = str

    @property
    def number(self) -> int | None:
        """The number of slices; 0: it is to be found; None: not asked for."""
        return None if self.slices is None else number_of(self.slices)

    @property
    def parts(self) -> Attention:
        """The parts of F."""
        if isinstance(self.attention, Attention):
            return self.attention
        return fit_attention(self.attention, self.length(f'{self.name("attention")} by lengths'))

    def length(self, option: str) -> int:
        """Return the tokens of a sequence, which `option` needs."""
        if self.seq_length is None:
            flag = self.name('seq_length')
            raise ValueError(f'{option} needs {flag}: give the tokens of a sequence')
        return self.seq_length

    def sizes(self, costs: Costs) -> tuple[int, ...]:
        """Return the tokens of each slice; none: slices are equal."""
        flag = self.name('slices')
        if isinstance(self.slices, ToFind):
            tokens = self.length(f'{flag} {self.slices}')
            return balanced(self.slices.number, tokens, self.parts, costs)
        if not isinstance(self.slices, tuple):
            return ()
        if self.seq_length not in (None, sum(self.slices)):
            raise ValueError(
                f'{flag} of {sum(self.slices)} tokens in all, but {self.name("seq_length")} is '
                f'{self.seq_length}: give sizes that sum to it'
            )
        return self.slices

    def costs_in_slices(self, costs: Costs, number: int, sizes: tuple[int, ...]) -> Costs:
        """Return costs of `number` slices, `sizes` tokens long or equal."""
        return costs if number == 1 else in_parts(costs, sizes or (1,) * number, self.parts)

    def cut(self, costs: Costs) -> Costs:
        """Return the costs of the slices that a plan is to have."""
        number = self.number or 1
        return self.costs_in_slices(costs, number, self.sizes(costs) if number > 1 else ())

    def with_sizes(self, schedule: Schedule, costs: Costs) -> tuple[Schedule, Costs]:
        """Return a schedule of slices with the length of each, and the costs of each."""
        sizes, number = self.sizes(costs), schedule.graph.num_slices
        if sizes and number > 1:
            schedule = replace(schedule, graph=sized(schedule.graph, sizes))
        sizes, wire = sizes_of(schedule.graph), self.context_exchange
        if wire is None:
            return schedule, self.costs_in_slices(costs, number, sizes)
        if sizes or number == 1:
            raise ValueError(
                f'{self.name("context_exchange")} {wire:g} needs slices of one size: give '
                f'{self.name("slices")} N, or leave it out'
            )
        if exchanging_context.__name__ not in techniques_of(schedule):
            schedule = replace(schedule, graph=exchanging_context(schedule.graph))
        return schedule, exchanged(costs, schedule.placement, number, self.parts, wire)

    def graph(self, costs: Costs) -> Slicing | None:
        """Return the graph of a plan's slices; None: of whole sequences."""
        number = self.number or 1
        return Slicing(number, self.sizes(costs)) if number > 1 else None


WHOLE_SEQUENCES = SliceRequest()


_HARDLY = 0.01  # of a value
_MOST_PASSES = 200_000


class Count(NamedTuple):
    """The best named schedule of a number of slices."""

    sizes: tuple[int, ...]  # tokens of each slice; one: sequences are whole
    name: str  # of the schedule
    value: float  # its makespan or window

    @property
    def slices(self) -> int:
        """Number of slices."""
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

    Numbers of which none fits are left out. `least` is the mean of the tokens of a slice. `on_time`
    is asked before each number, and where schedules take long to build, before each.
    """
    units = num_microbatches * max(3 * each.num_stages for each, _ in candidates)
    cut = partial(balanced, length=length, attention=attention, costs=candidates[0][1])
    for sizes in doubled(cut, length, least, units):
        if len(sizes) > 1 and not on_time():
            continue
        graphs = Slicing(len(sizes), sizes) if len(sizes) > 1 else None
        sliced = [(placement, in_parts(costs, sizes, attention)) for placement, costs in candidates]
        found: list[Count] = []
        for candidate in with_room(sliced, memory_limit, graphs):
            problem = question(candidate, num_microbatches, memory_limit, objective, graphs)
            known = named(problem, always if is_small(problem.num_passes) else on_time)
            found += [Count(sizes, entry.name, entry.value) for entry in known[:1]]
        if found:
            yield min(found, key=lambda count: count.value)


def doubled(
    cut: Callable[[int], tuple[int, ...]], length: int, least: int, units: int
) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of 1, 2, 4, ... slices, as many as there are tokens and time for.

    `cut` returns the tokens of so many slices; `least` is their mean; `units` are the passes of
    whole sequences.
    """
    yield (length,)
    slices = 2
    while slices * least <= length and slices * units <= _MOST_PASSES:
        try:
            yield cut(slices)
        except ValueError:  # the last ones would have no tokens
            return
        slices *= 2


def fewest(found: Sequence[Count]) -> Count:
    """Return the first that is hardly longer than the shortest."""
    if not found:
        raise ValueError(
            'no named schedule fits the memory limit, in any number of slices: give --slices a '
            'number, so that one is searched'
        )
    shortest = min(each.value for each in found)
    return next(each for each in found if each.value <= shortest * (1 + _HARDLY))
