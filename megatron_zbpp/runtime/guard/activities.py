"""Activities of the main thread that must not take forever: collectives, passes, and pauses.

Another thread looks at them: a `Tracker` tells where a rank is in its program, and the stack of the
main thread which call it is in.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_zbpp.analysis.program import Exchange, Receive, Send
from megatron_zbpp.ir import F, Pass
from megatron_zbpp.ir.graph import BROADCAST
from megatron_zbpp.runtime.executor import Executor

_FOLDERS = {
    'torch.distributed': os.path.dirname(dist.__file__),
    'torch': os.path.dirname(torch.__file__),
    'Python': sysconfig.get_path('stdlib'),
}
# functions that only call another one, as they are mostly named
_DECORATING = ('wrapper', 'handle_torch_function', '__torch_function__')


def calls_of(thread: int) -> list[traceback.FrameSummary]:
    """Return the calls that a thread is in, innermost first, without those that only decorate."""
    calls = reversed(traceback.extract_stack(sys._current_frames()[thread]))
    return [call for call in calls if call.name not in _DECORATING]


def is_distributed(call: traceback.FrameSummary) -> bool:
    return call.filename.startswith(_FOLDERS['torch.distributed'])


def is_library(call: traceback.FrameSummary) -> bool:
    """Return True if a call is of Python or torch, which tell little of the activity."""
    installed = any(name in call.filename for name in ('site-packages', 'dist-packages'))
    name = 'torch' if installed else 'Python'
    return call.filename.startswith(_FOLDERS[name])


def words(call: traceback.FrameSummary) -> str:
    return f'{call.name} ({call.filename}:{call.lineno})'


_LATEST = 10


class Position(NamedTuple):
    """A rank's place in its program."""

    done: int  # passes that the device has ended
    # the pass that runs, or whose input is waited for; the latest one between passes
    current: Pass | None
    # what the rank waits for, to arrive or to leave: a message, what a forward saved, or the result
    # of a collective
    waits: Receive | Send | Exchange | None


class Tracker:
    """Follows one iteration of `executor` from another thread.

    The host of a GPU runs ahead: there the clock's marks tell how far the device has come, and
    whether it waits for the input of its pass (the mark of its start comes behind that).
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._ended = 0  # passes known to have ended on the device
        # a pass alone does not tell if its slice 0 is one of several
        self._has_parts = any(isinstance(i, Pass) and i.slice for i in executor.program)

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
        waits = waits or (executor.transfers and executor.transfers.waits)
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
        """Return stage and microbatch of a pass, and its slice where sequences are sliced."""
        part = f' slice {p.slice}' if self._has_parts else ''
        return f'stage {p.stage} microbatch {p.microbatch}{part}'

    def _rank(self, rank: int) -> str:
        return f'pipeline rank {rank} (global rank {self._executor.channels.ranks[rank]})'


class Activity:
    """An activity of the main thread that must not take forever."""

    def ended(self) -> None:
        """Take note that the main thread has done its part."""

    def beat(self) -> Hashable:
        """Return something that changes with each step; None when all is over. Never wait."""
        raise NotImplementedError

    def lost(self) -> bool:
        """Return True if another rank has died that the main thread is not told of."""
        return False

    def standing(self) -> dict[str, str]:
        """Return the position in words, by heading: `now`, `waits for`, and others."""
        raise NotImplementedError

    def waits(self) -> tuple[int, ...]:
        """Return the global ranks that the activity waits for; here all but this one."""
        return tuple(rank for rank in range(dist.get_world_size()) if rank != dist.get_rank())


class Collective(Activity):
    """A collective call of the pipeline's ranks."""

    def __init__(self, what: str) -> None:
        self._what: str | None = what

    def ended(self) -> None:
        self._what = None

    def beat(self) -> Hashable:
        return self._what

    def standing(self) -> dict[str, str]:
        waits = 'the other ranks of the pipeline to come there'
        return {'now': f'{self._what}', 'waits for': waits}


class Forwards(Activity):
    """The forwards that `executor` runs ahead: its own part ends it."""

    def __init__(self, executor: Executor) -> None:
        self._tracker = Tracker(executor)
        self._over = False

    def ended(self) -> None:
        self._over = True

    def beat(self) -> Hashable:
        return None if self._over else self._tracker.position()

    def standing(self) -> dict[str, str]:
        return self._tracker.standing()

    def waits(self) -> tuple[int, ...]:
        return self._tracker.waits()


class Passes(Forwards):
    """One iteration of `executor`, or what reports call `part_of`, to its end on all ranks.

    A rank that is done tells the others by a reduction on `group` that nobody waits for: until it
    ends, a rank that stops in its cool-down would be missed by those that have no more passes.
    """

    def __init__(self, executor: Executor, group: Any, part_of: str | None = None) -> None:
        super().__init__(executor)
        self._part_of = {'part of': part_of} if part_of else {}
        self._group = group
        self._all_done: dist.Work | None = None

    def ended(self) -> None:
        self._all_done = self._group.allreduce([torch.zeros(1, device='cpu')])

    def beat(self) -> Hashable:
        work = self._all_done
        heard = work is not None and work.is_completed()
        over = heard and not self.lost() and self._tracker.complete
        return None if over else self._tracker.position()

    def lost(self) -> bool:
        work = self._all_done
        if work is None or not work.is_completed():
            return False
        try:
            work.wait()  # completed: it does not wait, but raise
        except RuntimeError:
            return True
        return False

    def standing(self) -> dict[str, str]:
        return super().standing() | self._part_of


class Pause(Activity):
    """A pause between two other activities, of which we know nothing but the calls."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def beat(self) -> Hashable:
        return self

    def standing(self) -> dict[str, str]:
        calls = calls_of(self._thread)
        caller = next((call for call in calls if not is_library(call)), calls[-1])
        waits = 'no collective call of torch.distributed'
        if is_distributed(calls[0]):
            of_torch = filter(is_distributed, itertools.takewhile(is_library, calls))
            waits = f'the other ranks to come to {[*of_torch][-1].name} of torch.distributed'
        return {'now': f'between passes, in {words(caller)}', 'waits for': waits}

    def waits(self) -> tuple[int, ...]:
        return super().waits() if is_distributed(calls_of(self._thread)[0]) else ()
