"""The interpreter: walks one rank's program.

It knows passes, messages and the weight-gradient store. In a schedule with W passes, BW is B and W
at once; in one without, backward is autograd's own and nothing is deferred. What a stage computes
it is told by a `Stage`; where its neighbours are, by `Channels`. Nothing here knows Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_zbpp.ir import BW, B, F, Pass, W
from megatron_zbpp.planning.lower import Program, Receive, Send
from megatron_zbpp.runtime.clock import Clock
from megatron_zbpp.runtime.comm import Channels, Incoming, Message
from megatron_zbpp.runtime.store import Key, WeightGradStore


class Stage(Protocol):
    """What the executor needs of one stage of the model; it keeps no state between passes."""

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Output of the stage; `received` is None on the first one. The last returns its loss."""

    def backward(
        self, received: torch.Tensor | None, output: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Gradient with respect to `received`; `gradient` is None on the last stage."""

    def release(self, output: torch.Tensor) -> None:
        """The data of `output` has been passed on; only its graph is still needed."""

    def gradients_complete(self) -> None:
        """The last weight gradient of this stage has been accumulated."""


@dataclass
class Record:
    """What one rank did in one iteration.

    Attributes:
        passes: in order.
        marks: (start, end) of each, for `Clock.seconds`.
        live: activations held after each, counted in (stage, microbatch) pairs by chunk.
    """

    passes: list[Pass] = field(default_factory=list)
    marks: list[tuple[object, object]] = field(default_factory=list)
    live: list[int] = field(default_factory=list)


class Executor:
    """Runs one iteration of `program` on this rank.

    Args:
        program: this rank's passes, sends and receives.
        stages: the stages that this rank holds.
        channels: to its neighbours.
        message: what neighbours exchange.
        store: where layers leave their weight gradients.
        clock: times the passes.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        channels: Channels,
        message: Message,
        store: WeightGradStore,
        clock: Clock,
    ) -> None:
        self._program = program
        self._stages = stages
        self._channels = channels
        self._message = message
        self._store = store
        self._clock = clock
        passes = [i for i in program if isinstance(i, Pass)]
        self._defers = any(p.kind == W for p in passes)
        self._trains = any(p.kind != F for p in passes)
        last = {p.stage: p for p in passes if p.kind in (W, BW)}
        self._completes = set(last.values())
        # A forward's message has arrived when its backward runs: more are never unfinished.
        self._keep = _most_live(passes)
        self._passes = {F: self._forward, B: self._backward, BW: self._backward, W: self._weights}
        self._incoming: dict[Pass, Incoming] = {}
        self._handed: dict[Pass, torch.Tensor] = {}
        self._saved: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def run(self) -> Record:
        """Every instruction in order; returns when this rank has done its part."""
        record = Record()
        made: torch.Tensor | None = (
            None  # by the latest pass; lowering puts its use right behind it
        )
        try:
            for instruction in self._program:
                if isinstance(instruction, Pass):
                    made = self._timed(instruction, record)
                elif isinstance(instruction, Receive):
                    self._incoming[instruction.consumer] = self._channels.post(
                        self._message, instruction.peer
                    )
                elif isinstance(instruction, Send):
                    self._channels.send(made, instruction.peer, self._keep)
                else:
                    self._handed[instruction.consumer] = made
            self._channels.finish()
        finally:
            self._store.clear()
        return record

    def _timed(self, p: Pass, record: Record) -> torch.Tensor | None:
        """Runs `p` once its input is there, and writes down when it ran and what is held after."""
        received = self._take(p)
        start = self._clock.mark()
        made = self._passes[p.kind](p, received)
        record.marks.append((start, self._clock.mark()))
        record.passes.append(p)
        record.live.append(len(self._saved) + self._store.pending)
        if p in self._completes:
            self._stages[p.stage].gradients_complete()
        return made

    def _take(self, p: Pass) -> torch.Tensor | None:
        """What a neighbouring stage made for `p`; None where the model begins or ends."""
        if p in self._handed:
            return self._handed.pop(p)
        return self._incoming.pop(p).wait() if p in self._incoming else None

    def _forward(self, p: Pass, received: torch.Tensor | None) -> torch.Tensor:
        key = (p.stage, p.microbatch)
        stage = self._stages[p.stage]
        if received is not None and self._trains:
            received.requires_grad_()
        with self._store.scope(key if self._defers else None):
            output = stage.forward(p.microbatch, received)
        made = output.detach()  # keeps the data alive for whoever gets it
        if self._trains:
            self._saved[key] = received, output
            stage.release(output)
        return made

    def _backward(self, p: Pass, gradient: torch.Tensor | None) -> torch.Tensor | None:
        key = (p.stage, p.microbatch)
        received, output = self._saved.pop(key)
        if not self._defers:
            return self._stages[p.stage].backward(received, output, gradient)
        self._store.open(key)
        with self._store.scope(key):
            made = self._stages[p.stage].backward(received, output, gradient)
        if p.kind == BW:
            self._store.run(key)
        return made

    def _weights(self, p: Pass, _: None) -> None:
        self._store.run((p.stage, p.microbatch))


def _most_live(passes: Sequence[Pass]) -> int:
    """Most forwards that `passes` have open at once; at least 1."""
    live = most = 1
    for p in passes:
        live += {F: 1, B: 0, W: -1, BW: -1}[p.kind]
        most = max(most, live)
    return most
