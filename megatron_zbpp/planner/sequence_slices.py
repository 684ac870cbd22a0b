"""Slices of sequences as they are asked for: how many, how long, and the time of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.cost_sources import Naming
from megatron_zbpp.techniques.composition import techniques_of
from megatron_zbpp.techniques.slices.balance import (
    Attention,
    balanced,
    exchanged,
    fit_attention,
    in_parts,
)
from megatron_zbpp.techniques.slices.graph import Slicing, exchanging_context, sized
from megatron_zbpp.techniques.slices.sizes import Slices, ToFind, number_of, sizes_of

_NONE = Attention()


@dataclass(frozen=True)
class SliceRequest:
    """Slices of a sequence, and the share of attention that makes later ones longer."""

    slices: Slices | None = None  # None: not asked for
    seq_length: int | None = None  # tokens of a sequence
    attention: Attention | Mapping[int, float] = _NONE  # or times of F by tokens
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
