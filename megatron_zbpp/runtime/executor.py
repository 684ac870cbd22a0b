"""The interpreter: walks one rank's program.

It knows passes, messages and the weight-gradient store. In a schedule with W passes, a pass of
several tasks does them one by one; in one without, backward is autograd's own and nothing is
deferred. What a stage computes it is told by a `Stage`; where its neighbours are, by `Channels`.
Nothing here knows Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from megatron_zbpp.analysis.program import Begin, Hand, Program, Receive, Send
from megatron_zbpp.ir import B, F, Pass, W, chain
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import Clock
from megatron_zbpp.runtime.messages import Awaited, messages
from megatron_zbpp.runtime.observe.profiling import profiled
from megatron_zbpp.runtime.observe.record import Record
from megatron_zbpp.runtime.side_work import SideWork
from megatron_zbpp.runtime.weight_grads import Key, WeightGradStore

_PLAIN = chain(1)  # what each kind of pass does, whatever its stage
_OUT, _BACK = 'O', 'L'


class Stage(Protocol):
    """What the executor needs of one stage of the model; it keeps no state between passes."""

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Output of the stage; `received` is None on the first one.

        The last returns its loss: where no backward follows, that may be anything.
        """
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
        self._activations = activations
        self._side = side
        # those whose input its maker on this rank may still use
        self._handed_to = {i.consumer for i in program if isinstance(i, Hand)}
        self._leaving = {(p.stage, p.microbatch) for p in passes if p.kind == _OUT}
        self.splits = any(p.kind == W for p in passes)
        self._trains = any(p.kind != F for p in passes)
        # what B accumulates by itself (norms, embeddings) is complete after the last of the first,
        # what waits for W after the last of the second
        self._last_backwards, self._last_weights = _last(passes, B), _last(passes, W)
        self._actions = {
            F: self._forward,
            B: self._backward,
            W: self._weights,
            _OUT: self._leave,
            _BACK: self._come_back,
        }
        self._done = 0  # instructions
        self._incoming: dict[Pass, Awaited] = {}
        self._handed: dict[Pass, torch.Tensor] = {}
        self._saved: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}

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
        finally:
            self._store.clear()
            if self._activations is not None:
                self._activations.clear()
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
        if self._activations is not None:
            self._activations.clear()

    def _run(self, instructions: Program) -> None:
        output: torch.Tensor | None = (
            None  # by the latest pass; lowering puts its use right behind it
        )
        for instruction in instructions:
            if isinstance(instruction, Pass):
                output = self._timed(instruction)
            elif isinstance(instruction, Receive):
                self._incoming[instruction.consumer] = self._messages.post(instruction)
            elif isinstance(instruction, Send):
                self._messages.send(self._messages.checked(output, instruction), instruction)
            elif isinstance(instruction, Begin):
                p = instruction.leaving
                self._moving.begin_out((p.stage, p.microbatch))
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
        away = 0 if self._activations is None else self._activations.away
        record.live.append(len(self._saved) + self._store.pending - away)
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
        leaves = key in self._leaving
        if leaves and received is not None and p in self._handed_to:
            received = received.clone()
        if received is not None and self._trains:
            received.requires_grad_()
        with (
            self._store.scope(key if self.splits else None),
            self._moving.packing(key) if leaves else nullcontext(),
        ):
            if leaves and received is not None:
                self._moving.take(key, received)
            output = stage.forward(p.microbatch, received)
        # keeps the data alive for whoever gets it
        detached = output.detach() if isinstance(output, torch.Tensor) else output
        if self._trains:
            self._saved[key] = received, output
            stage.release(output)
        return detached

    def _backward(self, p: Pass, gradient: torch.Tensor | None) -> torch.Tensor | None:
        key = (p.stage, p.microbatch)
        stage = self._stages[p.stage]
        received, output = self._saved.pop(key)
        if self.splits:
            self._store.open(key, waits=p.kind == B)
        with (
            self._store.scope(key if self.splits else None),
            stage.grad_sync(p in self._last_backwards),
            self._moving.using(key) if key in self._leaving else nullcontext(),
        ):
            return stage.backward(received, output, gradient)

    @property
    def _moving(self) -> ActivationStore:
        assert self._activations is not None, 'programs that move activations were refused'
        return self._activations

    def _leave(self, p: Pass, _: None) -> None:
        self._moving.leave((p.stage, p.microbatch))

    def _come_back(self, p: Pass, _: None) -> None:
        self._moving.begin_back((p.stage, p.microbatch))

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
        moves = p.kind in (_OUT, _BACK) and activations is not None
        if (p.kind not in _PLAIN.kinds and not moves) or p.slice:
            raise NotImplementedError(
                f'{p} cannot run yet: of techniques, {p.words}; schedules that run have '
                f'{", ".join((*_PLAIN.kinds, _OUT, _BACK))} of whole sequences'
            )
