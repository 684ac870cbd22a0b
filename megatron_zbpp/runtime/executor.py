"""The interpreter: walks one rank's program.

It knows passes, messages and the weight-gradient store. A pass is run by the action of its kind,
which gets what came for it by the names of the messages, and returns what goes on. A pass that does
both B and W is autograd's own backward, with nothing deferred, as in a schedule without W passes.
What a stage computes it is told by a `Stage`; where its neighbours are, by `Channels`. Nothing here
knows Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_zbpp.analysis.program import Begin, Exchange, Hand, Join, Program, Receive, Send
from megatron_zbpp.ir import B, F, Pass, Together, W
from megatron_zbpp.ir.graph import R
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import Clock, Filler, Record, profiled
from megatron_zbpp.runtime.messages import Awaited, Hop
from megatron_zbpp.runtime.messages import messages as made_of
from megatron_zbpp.runtime.stage import (
    Action,
    Backward,
    Forward,
    Inputs,
    Key,
    Outputs,
    RunTogether,
    Stage,
    Tensors,
    key_of,
)
from megatron_zbpp.runtime.tables import Tables, done_by
from megatron_zbpp.runtime.weight_grads import WeightGradStore

if TYPE_CHECKING:
    from megatron_zbpp.runtime.activations.store import ActivationStore
    from megatron_zbpp.runtime.collectives import Collectives

_Made = Outputs | Tensors | None  # by message; of built-in passes, the one that they make
_NOTHING = nullcontext()  # around a pass whose activations stay


class _Source(NamedTuple):
    """The pass that made a message (of a collective, the first of them), and its name."""

    producer: Pass
    message: str


class _Handed(NamedTuple):
    """A result of a pass of this rank for another one of it: no message is needed."""

    tensors: Tensors

    def wait(self) -> Tensors:
        return self.tensors


class Executor:
    """Runs one iteration of `program` on this rank."""

    def __init__(
        self,
        program: Program,  # this rank's passes, sends and receives
        stages: Mapping[int, Stage],  # the stages that this rank holds
        channels: Channels,  # to its neighbours
        # what neighbours exchange; by slice, where sequences are sliced
        message: Message | Sequence[Message],
        store: WeightGradStore,  # where layers leave their weight gradients
        clock: Clock,  # times the passes
        # makes the range around a pass in profiles
        named: Callable[[Pass], AbstractContextManager] = profiled,
        # moves what passes have saved, where the program says so
        activations: ActivationStore | None = None,
        side: Filler | None = None,  # what this rank does while it waits
        # runs a forward and a backward that the program joins; None: one after the other
        together: RunTogether | None = None,
        tables: Tables | None = None,  # of the program, where they are made already
        # of kinds of passes that are not built in, or in place of those that are
        actions: Mapping[str, Action] | None = None,
        # of names that differ from `message`; a tuple of them is sent as one
        messages: Mapping[str, Message | Hop] | None = None,
        collectives: Collectives | None = None,  # with the other ranks, where the program has some
        # what a stage sends to the next one, where edges differ: several tensors, or one each
        edges: Mapping[int, Hop] | None = None,
    ) -> None:
        self.program = program
        self.channels = channels
        self.clock = clock
        # What has been done so far; a watchdog reads this and the next two from another thread:
        # plain values, without a lock.
        self.record = Record()
        # the pass that runs, or whose input is waited for; the latest one between passes
        self.current: Pass | None = None
        self.awaiting = False  # whether its input is waited for
        self._stages = stages
        self._messages = made_of(channels, message, messages or {}, edges)
        self._store = store
        self._named = named
        self._tables = tables = tables or Tables(program)
        self._own_actions = own = actions or {}
        tables.reject_unsupported(activations is not None, collectives is not None, own)
        self._collectives = collectives
        self._side = side
        self._fills: Filler | None = None  # that, once the iteration has begun
        self._together = together
        # move what its forwards have saved; None: it stays on the device
        self.transfers = None if activations is None else activations.transfers(tables)
        self._leaving = frozenset[Key]() if activations is None else tables.leaving
        self.splits = tables.splits  # whether its program has W passes
        # keys that leave weight gradients to W
        self._split = tables.split(together is not None, store.left_out is not None)
        self._actions = {
            F: self._forward,
            R: self._recompute,
            B: self._backward,
            W: self._weights,
            **({} if self.transfers is None else self.transfers.actions),
        }
        self._done = 0  # instructions
        self._incoming: dict[Pass, Awaited] = {}  # of built-in passes, which take one message
        # of passes with actions of a technique, all that comes for them
        self._several: dict[Pass, list[tuple[_Source, Awaited]]] = {}
        self._contributions: dict[tuple[Pass, str], Any] = {}  # to collectives, by message
        self._saved: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._inputs: dict[Key, torch.Tensor | None] = {}  # of forwards that run again

    def run(self) -> Record:
        """Run every instruction that is left, in order; return when this rank has done its part.

        ValueError: a stage made something else than the message that its neighbour awaits.
        """
        if self._side is not None:
            self._side.begin(self.clock, self.record)
            self._fills = self._side
        try:
            self._run(self.program[self._done :])
            self.channels.finish()
            if self.transfers is not None:
                self.transfers.store.finish()
            if self._collectives is not None:
                self._collectives.finish()
        finally:
            self._store.clear()
            if self.transfers is not None:
                self.transfers.store.clear()
        return self.record

    def run_ahead(self, count: int) -> None:
        """Run the first `count` instructions, which are forwards and what goes with them."""
        self._run(self.program[:count])
        self._done = count

    def inherit(self, other: Executor) -> None:
        """Go on with what another one has left: activations, inputs, messages for later passes."""
        self._incoming, self._saved, self._inputs = other._incoming, other._saved, other._inputs

    def drop(self) -> None:
        """Forget what has been run ahead, once all that was sent for it has arrived.

        A message whose receive is given up would block its connection for ever (gloo), or be taken
        for the next one. One whose send is given up never leaves, and its receiver waits for ever:
        so this rank, too, waits until the others have dropped theirs.
        """
        self._messages.settle()
        for incoming in self._incoming.values():
            incoming.wait()
        for found in self._several.values():
            for _, each in found:
                each.wait()
        self.channels.finish()
        self._several.clear()
        self._contributions.clear()
        self._incoming.clear()
        self._saved.clear()
        self._inputs.clear()
        if self.transfers is not None:
            self.transfers.store.drop()

    def _run(self, instructions: Program) -> None:
        # by the latest passes; lowering puts their use right behind them
        made: dict[Pass, _Made] = {}
        joined: tuple[Pass, ...] = ()
        contributes = self._tables.contributes
        for instruction in instructions:
            if isinstance(instruction, Pass):
                if instruction not in joined:
                    made, joined = {}, ()
                if instruction not in made:
                    made[instruction] = self._timed(instruction)
                for message in contributes.get(instruction, ()):
                    own = self._made_for(message, instruction, made[instruction])
                    self._contributions[instruction, message] = own
            elif isinstance(instruction, Join):
                joined = instruction.passes
                as_one = self._together is not None and Together(joined).is_cell
                made = self._as_one(*joined) if as_one else {}
            elif isinstance(instruction, Begin):
                assert self.transfers is not None, 'refused else'
                self.transfers.begin(instruction)
            elif isinstance(instruction, Exchange):
                self._exchange(instruction)
            elif not isinstance(instruction, Hand) and instruction.saved:
                self._messages.settle()  # here the host may wait: what comes before is posted first
                assert self.transfers is not None, 'refused else'
                self.transfers.transfer(instruction)
            elif isinstance(instruction, Receive):
                self._expect(instruction, self._messages.post(instruction))
            elif isinstance(instruction, Send):
                self._messages.send(self._output(made, instruction), instruction)
            else:
                self._expect(instruction, _Handed(self._output(made, instruction)))

    def _expect(self, instruction: Receive | Hand, awaited: Awaited) -> None:
        source = _Source(instruction.producer, instruction.message)
        self._keep(instruction.consumer, source, awaited)

    def _keep(self, consumer: Pass, source: _Source, awaited: Awaited) -> None:
        if consumer.kind in self._own_actions:
            self._several.setdefault(consumer, []).append((source, awaited))
        else:
            self._incoming[consumer] = awaited

    def _made_for(self, message: str, p: Pass, made: _Made) -> object:
        """Return the part of a message in the output of a pass."""
        if p.kind in self._own_actions and isinstance(made, Mapping):
            return made.get(message)
        return made

    def _exchange(self, i: Exchange) -> None:
        """Begin a collective, and keep its result for the pass of this rank that takes it."""
        assert self._collectives is not None, 'refused else'
        keys = ((p, i.message) for p in i.producers)
        own = next((self._contributions.pop(k) for k in keys if k in self._contributions), None)
        awaited = self._collectives.begin(i, own)
        for p in i.consumers:
            if p in self._tables.own:
                self._keep(p, _Source(i.producers[0], i.message), awaited)

    def _output(self, made: Mapping[Pass, _Made], i: Send | Hand) -> Tensors:
        own = self._made_for(i.message, i.producer, made[i.producer])
        return self._messages.checked(own, i)

    def _timed(self, p: Pass) -> _Made:
        own = self._own_actions.get(p.kind)
        if own is not None:
            return self._run_own(p, own)
        received = self._await_one(p)
        first, *others = done_by(p)
        key = key_of(p)
        if self.transfers is not None and first in (B, R) and key in self._leaving:
            self.transfers.wait_until_loaded(key)  # a copy that is late is a wait, too, and no work
        start = self.clock.mark()
        with self._named(p):
            output = self._actions[first](p, received)
            if others and key in self._split:  # else autograd has done all at once
                for kind in others:
                    self._actions[kind](p, None)
        self._note(p, start, self.clock.mark())
        return output

    def _run_own(self, p: Pass, action: Action) -> Outputs:
        inputs = self._await(p)
        start = self.clock.mark()
        with self._named(p):
            outputs = action(p, inputs)
        self._note(p, start, self.clock.mark())
        return outputs

    def _as_one(self, *passes: Pass) -> dict[Pass, _Made]:
        """Run a forward and a backward as one, once the inputs of both are there."""
        assert self._together is not None, 'only what it runs is joined'
        ahead, back = sorted(passes, key=lambda p: p.kind != F)
        received, gradient = self._await_one(ahead), self._await_one(back)
        start = self.clock.mark()
        with self._named(ahead), self._named(back):
            forward = Forward(self._stages[ahead.stage], ahead, self._fed(received))
            backward = Backward(self._stages[back.stage], back, *self._opened(back), gradient)
            with (
                # forwards ask whether to defer, backwards for whom
                self._store.scope(key_of(back) if self.splits else None),
                backward.stage.grad_sync(back in self._tables.last_backwards),
            ):
                output, gradient = self._together(forward, backward)
            made: dict[Pass, _Made] = {
                ahead: self._kept(ahead, forward.received, output),
                back: gradient,
            }
            for kind in done_by(back)[1:] if self.splits else ():
                self._actions[kind](back, None)
        for p in passes:
            end = self.clock.mark()
            self._note(p, start, end)
            start = end
        self.record.joined.append(len(self.record.passes) - len(passes))
        return made

    def _await_one(self, p: Pass) -> torch.Tensor | None:
        self.awaiting, self.current = True, p
        self._messages.settle()
        awaited = self._incoming.pop(p, None)
        if self._fills is not None and awaited is not None and not isinstance(awaited, _Handed):
            self._fills.before(p)
        found = None if awaited is None else awaited.wait()
        self.awaiting = False  # not after an error: it tells what was waited for
        self.channels.let_go()
        return found  # pyright: ignore[reportReturnType]  # own kinds alone take several

    def _await(self, p: Pass) -> Inputs:
        self.awaiting, self.current = True, p
        self._messages.settle()
        came = self._several.pop(p, [])
        if self._fills is not None and came:
            self._fills.before(p)
        came.sort(key=lambda each: (each[0].producer.stage, each[0].producer.slice))
        inputs: dict[str, list[Tensors]] = {}
        for source, each in came:
            inputs.setdefault(source.message, []).append(each.wait())
        self.awaiting = False
        self.channels.let_go()
        return inputs

    def _note(self, p: Pass, start: object, end: object) -> None:
        record = self.record
        record.marks.append((start, end))
        record.passes.append(p)
        held = 0 if self.transfers is None else self.transfers.held(self._saved.keys())
        record.live.append(len(self._saved) + self._store.pending + held)

    def _forward(self, p: Pass, received: Any) -> Tensors:
        key, stage = key_of(p), self._stages[p.stage]
        packing: AbstractContextManager[None] = _NOTHING
        if self.transfers is not None and key in self._leaving:
            if received is not None and p in self._tables.handed_to:
                received = received.clone()
            packing = self.transfers.packing(key, received)
        received = self._fed(received)
        again = p.stage in self._tables.run_again
        run = stage.forward_without_graph if again else stage.forward
        with self._scope(key), packing:
            output = run(p, received)
        if not again:
            return self._kept(p, received, output)
        self._inputs[key] = received
        return _detached(output)

    def _fed(self, received: Any) -> Any:
        """Return the input of a forward, of which gradients will be asked."""
        if received is None or not self._tables.trains:
            return received
        if not isinstance(received, tuple):
            return received.requires_grad_()
        return tuple(x.requires_grad_() if x.is_floating_point() else x for x in received)

    def _kept(self, p: Pass, received: Any, output: Any) -> Any:
        detached = _detached(output)
        if self._tables.trains:
            self._saved[key_of(p)] = received, output
            self._stages[p.stage].release(output)
        return detached

    def _recompute(self, p: Pass, _: None) -> None:
        key = key_of(p)
        stage, received = self._stages[p.stage], self._inputs.pop(key)
        with self._scope(key):
            output = stage.recompute(p, received)
        self._saved[key] = received, output
        stage.release(output)

    def _backward(self, p: Pass, gradient: torch.Tensor | None) -> torch.Tensor | None:
        key, stage = key_of(p), self._stages[p.stage]
        received, output = self._opened(p)
        during: AbstractContextManager[None] = _NOTHING
        if self.transfers is not None and key in self._leaving:
            during = self.transfers.store.during_backward(key)
        with self._scope(key), stage.grad_sync(p in self._tables.last_backwards), during:
            return stage.backward(p, received, output, gradient)

    def _opened(self, p: Pass) -> tuple[Any, Any]:
        key = key_of(p)
        if key in self._split:
            self._store.open(key, waits=p.kind == B)
        return self._saved.pop(key)

    def _scope(self, key: Key) -> WeightGradStore:
        return self._store.scope(key if key in self._split else None)

    def _weights(self, p: Pass, _: None) -> None:
        with self._stages[p.stage].grad_sync(p in self._tables.last_weights):
            self._store.run(key_of(p))


def _detached(output: Any) -> Any:
    """Return an output without its graph, which keeps the data alive for whoever gets it."""
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, tuple):  # of several tensors; where no backward follows, of anything
        return tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in output)
    return output
