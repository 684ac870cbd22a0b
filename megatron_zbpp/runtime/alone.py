"""A rank by itself: the passes of one microbatch, with noise for what other ranks would send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_zbpp.analysis.program import Exchange, Hand, Instruction, Program, Receive, Send
from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.activations.moves import KINDS as MOVING
from megatron_zbpp.runtime.channels import Channels, Incoming, Message


def one_microbatch(program: Program) -> Program:
    """Return the program of the first microbatch of each stage of a rank, in the same order.

    Activations stay where they are, and passes that the program joins run one after the other.
    Collectives of the pipeline stay: every rank comes to them without a message of another.
    """
    first: dict[int, int] = {}
    for p in program:
        if isinstance(p, Pass):
            first.setdefault(p.stage, p.microbatch)
    kept = {
        p
        for p in program
        if isinstance(p, Pass) and p.kind not in MOVING and first[p.stage] == p.microbatch
    }
    return tuple(_only(kept, program))


def _only(kept: set[Pass], program: Program) -> Iterator[Instruction]:
    for i in program:
        if isinstance(i, Hand) and i.consumer in kept and i.producer not in kept:
            yield Receive(i.producer, i.consumer, 0, False, i.message)
        elif any(p in kept for p in _passes(i)):
            yield i


def _passes(i: Instruction) -> Sequence[Pass]:
    """Return the passes whose instruction it is."""
    match i:
        case Pass():
            return (i,)
        case Hand() | Receive(saved=False):
            return (i.consumer,)
        case Send(saved=False):
            return (i.producer,)
        case Exchange():
            return (*i.producers, *i.consumers)
        case _:
            return ()


class NoPeers(Channels):
    """Channels to no rank: sent tensors are dropped, received tensors are noise.

    Noise and not zeros, by which all tokens would go to the same experts; the same on all ranks, as
    those of a tensor-parallel group take one tensor for theirs. Whole numbers are 1: an index or a
    divisor that there is.
    """

    def __init__(self, pp_group: dist.ProcessGroup) -> None:
        self.pp_group = pp_group
        self.rank = dist.get_rank(pp_group)
        self.ranks: Sequence[int] = dist.get_process_group_ranks(pp_group)
        self.leaving = None
        self._generator = torch.Generator().manual_seed(0)  # the host's

    def send(self, tensor: torch.Tensor, send: Send) -> None:
        pass

    def post(self, message: Message, peer: int) -> Incoming:
        assert message.shape is not None, 'nobody tells shapes'
        if not message.dtype.is_floating_point:
            return Incoming(torch.ones(message.shape, dtype=message.dtype, device=message.device))
        noise = torch.randn(message.shape, generator=self._generator)
        return Incoming(noise.to(message.device, message.dtype))

    def let_go(self) -> None:
        pass

    def finish(self) -> None:
        pass
