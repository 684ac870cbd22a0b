"""A schedule in Megatron's ranks, and its proven programs.

A schedule whose placement ends on rank 0 (every V) is run with its ranks reversed, as a Λ: loss and
embedding are on the last rank, where Megatron's loss logging, evaluation, token counts and output
casts expect the loss.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_zbpp.analysis.program import LATE, Begin, Program, Send
from megatron_zbpp.analysis.run_ahead import passes_run_ahead, split
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.runtime.tables import Tables
from megatron_zbpp.techniques.two_way.fold import folded, over_replicas

if TYPE_CHECKING:
    from megatron_zbpp.techniques.updates.calls import Calls


def for_megatron(schedule: Schedule) -> Schedule:
    """Return `schedule`, its ranks reversed if that brings the loss to the last rank.

    A two-way one is over two replicas of the pipeline: see `techniques.two_way.fold`.

    Raises:
        ValueError: the loss is on neither end, and Megatron reports from the last rank.
    """
    one = one_replica(schedule.placement)
    last = one.num_ranks - 1
    if one.only_route[-1] != last:
        raise ValueError(
            f'{schedule.name} places the last stage on rank {last - one.only_route[-1]}: '
            f'Megatron needs it on the first or last rank (0 or {last})'
        )
    if not schedule.placement.is_one_way:
        return over_replicas(schedule, one)
    return schedule if schedule.placement == one else schedule.reversed()


def one_replica(placement: Placement) -> Placement:
    """Return where a replica has its stages, reversed if they do not end on the last rank."""
    one = folded(placement)
    return one if one.only_route[-1] == one.num_ranks - 1 else one.reversed()


class Size(NamedTuple):
    """The size of a call, by which programs are kept.

    Attributes:
        num_ranks, num_microbatches: p and m.
        forward_only: whether there are no backwards.
        together: whether pairs of F and BW are to run as one.
        draining: whether a synchronous schedule runs in place of an asynchronous one.
        receives: when they are posted.
    """

    num_ranks: int
    num_microbatches: int
    forward_only: bool
    together: bool
    draining: bool = False
    receives: str = LATE


@dataclass(frozen=True, eq=False)
class Lowered:
    """A checked schedule as programs, in Megatron's ranks."""

    schedule: Schedule  # as it was checked
    programs: tuple[Program, ...]  # of all ranks
    # how many of its first passes each rank may run before an iteration begins
    ahead: tuple[int, ...]
    # of an asynchronous schedule, which goes on from call to call; None: it is none
    calls: Calls | None = None

    @property
    def placement(self) -> Placement:
        return self.schedule.placement

    @functools.cached_property
    def num_passes(self) -> int:
        """Passes of all ranks."""
        return sum(map(len, self.schedule.passes))

    @functools.cached_property
    def moves(self) -> bool:
        """True if activations leave the device."""
        return any(
            isinstance(i, Begin) or (isinstance(i, Send) and i.saved)
            for program in self.programs
            for i in program
        )

    @functools.cached_property
    def partners(self) -> frozenset[tuple[int, int]]:
        """Pairs of ranks, of which one sends the other what forwards have saved."""
        return frozenset(
            (rank, i.peer)
            for rank, program in enumerate(self.programs)
            for i in program
            if isinstance(i, Send) and i.saved
        )

    @functools.lru_cache(64)  # noqa: B019 - as many as ranks; they end with the session's programs
    def tables(self, rank: int, ranks_ahead: int) -> tuple[Tables, int]:
        """Return the program of a rank with its tables, and how many instructions come ahead."""
        passes = passes_run_ahead(self.schedule, self.ahead, ranks_ahead) if ranks_ahead else set()
        first, rest = split(self.programs[rank], passes)
        return Tables(first + rest), len(first)
