"""Training faces: the protocol between a training and the techniques of its schedule.

A face is the part of a technique in training: the class in the module `mcore.techniques.NAME` that
is named like it, as `TwoWay` in `two_way`, which is imported with its schedules alone. A session
makes each face once and asks it before each call; a face overrides the methods that it needs. This
module imports no room of Megatron.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.mcore.lowered import Lowered
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.stage import Action, RunTogether, Wrapper
from megatron_zbpp.runtime.tables import Tables

_ROOM = 'megatron_zbpp.mcore.techniques'
_OWN: dict[str, Callable[[Any], Face]] = {}  # registered by others

Wrap = Callable[[Any], Wrapper]
"""Makes the wrapper of a stage."""


class CallContext(NamedTuple):
    """One call of Megatron's, as far as it is known before stages are made."""

    arguments: Any  # `iteration.stages.Arguments`
    lowered: Lowered
    next_iteration: Any  # `iteration.batch.NextIteration`
    chunks: Sequence[torch.nn.Module]  # of this rank, unwrapped
    rank: int  # in the pipeline
    messages: Sequence[Message]  # between neighbours, by part of a sequence


class Passes(NamedTuple):
    """Passes of a technique: actions by kind, messages of collectives by name and part."""

    actions: Mapping[str, Action] = {}
    collectives: Mapping[str, tuple[Message, ...]] = {}


class Face:
    """A technique in training; this one does nothing."""

    nest: int  # its place among wrappers: the innermost has the least
    name: str  # of the technique
    comparable: bool = True  # whether measured times tell the times of other schedules
    simulated: bool = True  # whether a simulation of one call tells the time of an iteration
    no_side_task: str | None = None  # why no side task runs beside the schedule, and the cure
    no_hops: str | None = None  # the cure where stages exchange several tensors, or wider ones
    takes_wide: bool = False  # `no_hops` is about several tensors alone
    stays_alone: str | None = None  # why the chunks of a rank cannot run by themselves
    together: RunTogether | None = None  # runs an overlapped F and B
    next_iteration: Any = None  # forwards of the next iteration, in place of `NextIteration`
    optimizer_steps: Any = None  # takes them, as `EarlySteps` does; None: Megatron does

    def __init__(self, session: Any) -> None:
        self.session = session

    def patches(self) -> Iterator[Any]:
        """Yield the patches of Megatron, before models are built."""
        yield from ()

    def require(self, chunk: torch.nn.Module) -> None:
        """Raise NotImplementedError for a chunk, unwrapped, that does not train so."""

    def data_parallel_rank(self, chunk: int) -> int | None:
        """Return the data-parallel rank whose data a chunk of this rank reads; None: its own."""

    def pipeline(self, groups: Any) -> Any:
        """Return the group of the ranks that run one schedule; None: those of a pipeline."""

    def settle(self, arguments: Any, config: Any, num_ranks: int) -> None:
        """Settle what was left open until the first call, alike on all ranks."""

    def lengths(self, arguments: Any, config: Any) -> tuple[int, ...] | None:
        """Return the tokens of each part of a sequence; None: sequences are whole."""

    def fingerprint(self) -> Mapping[str, object]:
        """Return the values on which all ranks of a pipeline must agree."""
        return {}

    def finish_step(self) -> None:
        """Take the optimizer step that is begun, if one is."""

    def announced(self, lowered: Lowered) -> Schedule | None:
        """Return the schedule that the user is told of; None: that of the first call."""

    def notes(self, config: Any) -> Iterator[str]:
        """Yield lines for the log before the first call, beside those of the schedule."""
        yield from ()

    def drains(self, forward_only: bool) -> bool:
        """Return True if a synchronous schedule runs in this call; asked once a call."""
        return False

    def begin(self, context: CallContext) -> Wrap | None:
        """Return the maker of wrappers; None: the technique is not at work in this call."""

    def data(
        self, stages: Sequence[int], data: Sequence[Iterator | None]
    ) -> Sequence[Iterator | None]:
        """Return the data that the stages of this rank read in a call."""
        return data

    def ended(self, placement: Placement, pipeline: Any) -> None:
        """Take note that the passes of a call have ended, on the ranks of `pipeline`."""

    def passes(self, stages: Sequence[Any], context: CallContext) -> Passes:
        """Return the technique's own passes on this rank, of wrapped stages."""
        return Passes()

    def tables(self, context: CallContext, tables: Tables) -> Tables:
        """Return the tables of the program that this rank runs."""
        return tables

    def enter(self, executor: Executor) -> None:
        """Take note of the executor of the call."""


def register(name: str, face: Callable[[Any], Face]) -> None:
    """Enter the face of a technique of one's own, made of a session."""
    _OWN[name] = face


def face_of(name: str, session: Any) -> Face | None:
    """Return the face of a technique; None: it has none, as its passes are built in."""
    make = _OWN.get(name)
    if make is None:
        if find_spec(f'{_ROOM}.{name}') is None:
            return None
        module = importlib.import_module(f'{_ROOM}.{name}')
        make = getattr(module, name.title().replace('_', ''))
    face = make(session)
    face.name = name
    return face
