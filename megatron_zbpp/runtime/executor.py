"""The interpreter: walks one rank's program.

It knows passes, messages and the weight-gradient store. In a schedule with W passes, a pass of
several tasks does them one by one; in one without, backward is autograd's own and nothing is
deferred. What a stage computes it is told by a `Stage`; where its neighbours are, by `Channels`.
Nothing here knows Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from megatron_zbpp.analysis.program import Begin, Hand, Program, Receive, Send
from megatron_zbpp.ir import B, F, Pass, W, chain
from megatron_zbpp.runtime.activations import moves
from megatron_zbpp.runtime.activations.moves import Moves
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import Clock
from megatron_zbpp.runtime.messages import Awaited, messages
from megatron_zbpp.runtime.observe.profiling import profiled
from megatron_zbpp.runtime.observe.record import Record
from megatron_zbpp.runtime.side_work import SideWork
from megatron_zbpp.runtime.weight_grads import Key, WeightGradStore

_PLAIN = chain(1)  # what each kind of pass does, whatever its stage
_AGAIN = 'R'
_RUN = (*_PLAIN.kinds, _AGAIN)


class Stage(Protocol):
    """What the executor needs of one stage of the model; it keeps no state between passes."""

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Output of the stage; `received` is None on the first one.

        The last returns its loss: where no backward follows, that may be anything.
        """
        ...

    def forward_unsaved(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Output of the stage, of which nothing is kept: `recompute` makes it again."""
        ...

    def recompute(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Make the same output again, to the bit, with its graph; leave nothing else behind."""
        ...

    def backward(
        self, received: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Gradient with respect to `received`; `gradient` is None on the last stage."""
        ...

    def release(self, output: torch.Tensor) -> None:
        """Release the data of `output`, which has been passed on; its graph is still needed."""

    def grad_sync(self, last: bool) -> AbstractContextManager[None]:
        """Around what accumulates gradients; `last`: these parameters get no more after it."""
        ...


class Executor:
    """Runs one iteration of `program` on this rank.

    Args:
        program: this rank's passes, sends and receives.
        stages: the stages that this rank holds.
        channels: to its neighbours.
        message: what neighbours exchange.
        store: where layers leave their weight gradients.
        clock: times the passes.
        named: makes the range around a pass in profiles.
        activations: moves what passes have saved, where the program says so.
        side: what this rank does while it waits.

    Attributes:
        record: what has been done so far. This and the next two are what a watchdog reads, from
            another thread: plain values, without a lock.
        current: the pass that runs, or whose input is waited for; the latest one between passes.
        awaiting: whether its input is waited for.
        moves: what its forwards have saved, where that moves.
        splits: whether its program has W passes.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        channels: Channels,
        message: Message,
        store: WeightGradStore,
        clock: Clock,
        named: Callable[[Pass], AbstractContextManager] = profiled,
        activations: ActivationStore | None = None,
        side: SideWork | None = None,
    ) -> None:
        self.program = program
        self.channels = channels
        self.clock = clock
        self.record = Record()
        self.current: Pass | None = None
        self.awaiting = False
        self._stages = stages
        self._messages = messages(channels, message)
        self._store = store
        self._named = named
        passes = [i for i in program if isinstance(i, Pass)]
        _refuse_others(passes, activations)
        self._side = side
        self.moves = Moves(program, activations)
        # those whose input its maker on this rank may still use
        self._handed_to = {i.consumer for i in program if isinstance(i, Hand)}
        self.splits = any(p.kind == W for p in passes)
        self._trains = any(p.kind != F for p in passes)
        # what B accumulates by itself (norms, embeddings) is complete after the last of the first,
        # what waits for W after the last of the second
        self._last_backwards, self._last_weights = _last(passes, B), _last(passes, W)
        # those of which F keeps the input only
        self._recomputed = {(p.stage, p.microbatch) for p in passes if p.kind == _AGAIN}
        self._actions = {
            F: self._forward,
            _AGAIN: self._recompute,
            B: self._backward,
            W: self._weights,
            **self.moves.actions,
        }
        self._done = 0  # instructions
        self._incoming: dict[Pass, Awaited] = {}
        self._handed: dict[Pass, torch.Tensor] = {}
        self._saved: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._inputs: dict[Key, torch.Tensor | None] = {}  # of forwards that run again

    def run(self) -> Record:
        """Every instruction that is left, in order; returns when this rank has done its part.

        Raises:
            ValueError: a stage made something else than the message that its neighbour awaits.
        """
        if self._side is not None:
            self._side.begin(self.clock, self.record)
        try:
            self._run(self.program[self._done :])
            self.channels.finish()
            self.moves.finish()
        finally:
            self._store.clear()
            self.moves.clear()
        return self.record

    def run_ahead(self, count: int) -> None:
        """Run the first `count` instructions, which are forwards and what goes with them.

        Raises:
            ValueError: as `run`.
        """
        self._run(self.program[:count])
        self._done = count

    def drop(self) -> None:
        """Forget what has been run ahead, once all that was sent for it has arrived.

        A message whose receive is given up would block its connection for ever (gloo), or be taken
        for the next one.
        """
        self._messages.settle()
        for incoming in self._incoming.values():
            incoming.wait()
        self._incoming.clear()
        self._handed.clear()
        self._saved.clear()
        self._inputs.clear()
        self.moves.drop()

    def _run(self, instructions: Program) -> None:
        output: torch.Tensor | None = (
            None  # by the latest pass; lowering puts its use right behind it
        )
        for instruction in instructions:
            if isinstance(instruction, Pass):
                output = self._timed(instruction)
            elif isinstance(instruction, Begin):
                self.moves.begin(instruction)
            elif not isinstance(instruction, Hand) and instruction.saved:
                self._messages.settle()  # here the host may wait: what comes before is posted first
                self.moves.transfer(instruction)
            elif isinstance(instruction, Receive):
                self._incoming[instruction.consumer] = self._messages.post(instruction)
            elif isinstance(instruction, Send):
                self._messages.send(self._messages.checked(output, instruction), instruction)
            else:
                self._handed[instruction.consumer] = self._messages.checked(output, instruction)

    def _timed(self, p: Pass) -> torch.Tensor | None:
        """Run `p` once its input is there, and write down when it ran and what is held after."""
        record = self.record
        self.current, self.awaiting = p, True
        self._messages.settle()
        if self._side is not None and p in self._incoming:
            self._side.before(p)
        received = self._take(p)
        self.awaiting = False  # not after an error: it tells what was waited for
        self.channels.let_go()
        start = self.clock.mark()
        with self._named(p):
            first, *others = _done_by(p)
            output = self._actions[first](p, received)
            for kind in others if self.splits else ():  # else autograd has done all at once
                self._actions[kind](p, None)
        record.marks.append((start, self.clock.mark()))
        record.passes.append(p)
        record.live.append(len(self._saved) + self._store.pending + self.moves.held)
        return output

    def _take(self, p: Pass) -> torch.Tensor | None:
        """Return what a neighbouring stage made for `p`; None where the model begins or ends."""
        if p in self._handed:
            return self._handed.pop(p)
        if p not in self._incoming:
            return None
        return self._incoming.pop(p).wait()

    def _forward(self, p: Pass, received: torch.Tensor | None) -> torch.Tensor:
        key = (p.stage, p.microbatch)
        stage = self._stages[p.stage]
        if received is not None and p in self._handed_to and self.moves.leaves(key):
            received = received.clone()
        if received is not None and self._trains:
            received.requires_grad_()
        scope = self._store.scope(key if self.splits else None)
        again = key in self._recomputed
        run = stage.forward_unsaved if again else stage.forward
        with scope, self.moves.packing(key, received):
            output = run(p.microbatch, received)
        # keeps the data alive for whoever gets it
        detached = output.detach() if isinstance(output, torch.Tensor) else output
        if again:
            self._inputs[key] = received
        elif self._trains:
            self._saved[key] = received, output
            stage.release(output)
        return detached

    def _recompute(self, p: Pass, _: None) -> None:
        key = (p.stage, p.microbatch)
        stage, received = self._stages[p.stage], self._inputs.pop(key)
        self.moves.await_back(key)
        with self._store.scope(key if self.splits else None):
            output = stage.recompute(p.microbatch, received)
        self._saved[key] = received, output
        stage.release(output)

    def _backward(self, p: Pass, gradient: torch.Tensor | None) -> torch.Tensor | None:
        key = (p.stage, p.microbatch)
        stage = self._stages[p.stage]
        received, output = self._saved.pop(key)
        if self.splits:
            self._store.open(key, waits=p.kind == B)
        with (
            self._store.scope(key if self.splits else None),
            stage.grad_sync(p in self._last_backwards),
            self.moves.using(key),
        ):
            return stage.backward(received, output, gradient)

    def _weights(self, p: Pass, _: None) -> None:
        with self._stages[p.stage].grad_sync(p in self._last_weights):
            self._store.run((p.stage, p.microbatch))


def _done_by(p: Pass) -> tuple[str, ...]:
    """Return kinds of the tasks that `p` does."""
    if p.kind not in _PLAIN.kinds:
        return (p.kind,)
    return tuple(task.kind for task in _PLAIN.tasks(p.kind, 0))


def _last(passes: Sequence[Pass], kind: str) -> set[Pass]:
    """Return the last pass of each stage that does a task of `kind`."""
    return set({p.stage: p for p in passes if kind in _done_by(p)}.values())


def _refuse_others(passes: Sequence[Pass], activations: ActivationStore | None) -> None:
    """Raise for what only the planner and the pictures know so far.

    Raises:
        NotImplementedError: names the pass.
    """
    for p in passes:
        moving = p.kind in moves.KINDS and activations is not None
        if (p.kind not in _RUN and not moving) or p.slice:
            raise NotImplementedError(
                f'{p} cannot run yet: of techniques, {p.words}; schedules that run have '
                f'{", ".join((*_RUN, *moves.KINDS))} of whole sequences'
            )
