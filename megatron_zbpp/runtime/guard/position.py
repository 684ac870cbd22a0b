"""A rank's position in its program, as another thread sees it: for reports of stalls."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from megatron_zbpp.analysis.program import Exchange, Receive, Send
from megatron_zbpp.ir import F, Pass
from megatron_zbpp.ir.graph import BROADCAST
from megatron_zbpp.runtime.executor import Executor

_LATEST = 10


class Position(NamedTuple):
    """A rank's place in its program.

    Attributes:
        done: passes that the device has ended.
        current: the pass that runs, or whose input is waited for; the latest one between passes.
        waits: what the rank waits for, to arrive or to leave: a message, what a forward saved, or
            the result of a collective.
    """

    done: int
    current: Pass | None
    waits: Receive | Send | Exchange | None


class Tracker:
    """Follows one iteration of `executor` from another thread.

    The host of a GPU runs ahead: there the clock's marks tell how far the device has come, and
    whether it waits for the input of its pass (the mark of its start comes behind that).
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._ended = 0  # passes known to have ended on the device
        self._sliced = any(isinstance(i, Pass) and i.slice for i in executor.program)

    def position(self) -> Position:
        """Now; cheap, and never waits for the device."""
        executor = self._executor
        passes, marks, clock = executor.record.passes, executor.record.marks, executor.clock
        recorded, ended = len(passes), self._ended
        while ended < recorded and clock.reached(marks[ended][1]):
            ended += 1
        self._ended = ended
        if ended < recorded:
            current, awaiting = passes[ended], not clock.reached(marks[ended][0])
        else:
            current, awaiting = executor.current, executor.awaiting
        waits = self._receive(current) if current and awaiting else executor.channels.leaving
        waits = waits or executor.moves.waits
        return Position(ended, current, waits)

    def _receive(self, consumer: Pass) -> Receive | Exchange | None:
        for i in self._executor.program:
            if isinstance(i, Receive) and i.consumer == consumer:
                return i
            if isinstance(i, Exchange) and consumer in i.consumers:
                return i
        return None

    @property
    def complete(self) -> bool:
        """True once the device has ended every pass."""
        total = sum(isinstance(i, Pass) for i in self._executor.program)
        return self.position().done == total

    def waits(self) -> tuple[int, ...]:
        """Return the global ranks that this one waits for."""
        ranks = self._executor.channels.ranks
        waits = self.position().waits
        if isinstance(waits, Receive | Send):
            return (ranks[waits.peer],)
        if waits is not None and waits.operation == BROADCAST and waits.root is not None:
            return (ranks[waits.root],)
        all_others = waits is not None or self.complete
        return tuple(r for r in ranks if r != dist.get_rank()) if all_others else ()

    def standing(self) -> dict[str, str]:
        """Return the position and the latest ten passes, for people."""
        position = self.position()
        latest = self._executor.record.passes[: position.done][-_LATEST:]
        return {
            'now': self._now(position, latest),
            'waits for': self._awaited(position),
            'last passes': ' '.join(map(str, latest)) or 'none',
        }

    def _now(self, position: Position, latest: list[Pass]) -> str:
        current = position.current
        if current is None:
            return 'before its first pass'
        if self.complete:
            return f'all {position.done} passes done'
        place = f'{self._pass(current)} ({current})'
        return f'right after {place}' if current in latest[-1:] else place

    def _awaited(self, position: Position) -> str:
        waits = position.waits
        if isinstance(waits, Exchange):
            what = f'{waits.message!r} of microbatch {waits.producers[0].microbatch}'
            if waits.operation == BROADCAST and waits.root is not None:
                return f'the {waits.operation} of {what} by {self._rank(waits.root)}'
            return f'the other ranks to contribute to the {waits.operation} of {what}'
        if waits is not None and waits.saved:
            whose = f'activations of {self._unit(waits.consumer)}'
            if isinstance(waits, Receive):
                return f'{whose} from {self._rank(waits.peer)}'
            return f'{self._rank(waits.peer)} to take {whose}'
        if isinstance(waits, Receive):
            made = waits.producer
            what = f'{"output" if made.kind == F else "gradient"} of {self._unit(made)}'
            return f'{what} from {self._rank(waits.peer)}'
        if isinstance(waits, Send):
            taker = f'{self._rank(waits.peer)} to take what {self._pass(waits.producer)} made'
            return f'{taker} for {self._pass(waits.consumer)}'
        if self.complete:
            return 'the other ranks of the pipeline to end their passes'
        return 'no message'

    def _pass(self, p: Pass) -> str:
        return f'{p.kind} {self._unit(p)}'

    def _unit(self, p: Pass) -> str:
        """Return where in the model a pass is, and of what: its slice, too, where there are some.

        Of a pass alone one cannot tell whether its slice 0 is one of several.
        """
        part = f' slice {p.slice}' if self._sliced else ''
        return f'stage {p.stage} microbatch {p.microbatch}{part}'

    def _rank(self, rank: int) -> str:
        return f'pipeline rank {rank} (global rank {self._executor.channels.ranks[rank]})'
