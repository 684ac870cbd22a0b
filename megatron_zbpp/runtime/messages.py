"""What neighbouring stages exchange, checked before it leaves: of one shape, or of any.

Megatron's `variable_seq_lengths` lets each microbatch have a length of its own. Then the shape of
what a forward sends is told ahead of it, on the host; a gradient has the shape of what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatron_zbpp.analysis.program import Hand, Receive, Send
from megatron_zbpp.ir import F
from megatron_zbpp.runtime.channels import Channels, Incoming, Message


class Awaited(Protocol):
    """A message that is on its way."""

    def wait(self) -> torch.Tensor:
        """Return it, arrived."""
        ...


class Messages(Protocol):
    """What the executor sends and receives by."""

    def checked(self, output: object, instruction: Send | Hand) -> torch.Tensor:
        """Return `output`, which goes to another stage, if it is a message.

        Raises:
            ValueError: it is another tensor, or none.
        """
        ...

    def send(self, output: torch.Tensor, send: Send) -> None:
        """Start sending it."""

    def post(self, receive: Receive) -> Awaited:
        """Post a receive, or at the next `settle`."""
        ...

    def settle(self) -> None:
        """Return once all receives are posted; called before each pass."""


def messages(channels: Channels, message: Message) -> Messages:
    """Return those of one shape, or of any where `message` has none."""
    return Alike(channels, message) if message.shape is not None else Varying(channels, message)


class Alike:
    """Messages of one shape: all is known of them before they are sent.

    Args:
        channels: to the neighbours.
        message: what is exchanged.
    """

    def __init__(self, channels: Channels, message: Message) -> None:
        self._channels, self._message = channels, message

    def checked(self, output: object, instruction: Send | Hand) -> torch.Tensor:
        shape, dtype = self._message.shape, self._message.dtype
        if isinstance(output, torch.Tensor) and output.shape == shape and output.dtype == dtype:
            return output
        raise ValueError(
            f'{instruction.producer.words} made {_in_words(output)}, but '
            f'{instruction.consumer.words} takes {shape} of {dtype}: every stage must keep the '
            'shape that sequence length, micro batch and hidden size give, and the dtype of the '
            'pipeline'
        )

    def send(self, output: torch.Tensor, send: Send) -> None:
        self._channels.send(output, send)

    def post(self, receive: Receive) -> Incoming:
        return self._channels.post(self._message, receive.peer)

    def settle(self) -> None:
        pass  # they are posted at once


class Varying:
    """Messages of any shape.

    A receive is posted right before the next pass, when its shape has come. Where a pass waits for
    its device, it waits for all receives before it, too, and so for the senders of these: what the
    checker has proven of that rule holds for waiting here.

    Args:
        channels: to the neighbours; they can tell shapes.
        message: what is exchanged, without its shape.
    """

    def __init__(self, channels: Channels, message: Message) -> None:
        self._channels, self._message = channels, message
        self._sent: dict[tuple[int, int], torch.Size] = {}  # by stage and microbatch
        self._expected: list[_Expected] = []

    def checked(self, output: object, instruction: Send | Hand) -> torch.Tensor:
        dtype = self._message.dtype
        if isinstance(output, torch.Tensor) and output.dtype == dtype:
            return output
        raise ValueError(
            f'{instruction.producer.words} made {_in_words(output)}, but '
            f'{instruction.consumer.words} takes a tensor of {dtype}: every stage must keep the '
            'dtype of the pipeline'
        )

    def send(self, output: torch.Tensor, send: Send) -> None:
        if send.consumer.kind == F:
            self._sent[send.producer.stage, send.producer.microbatch] = output.shape
            self._channels.tell(output.shape, send)
        self._channels.send(output, send)

    def post(self, receive: Receive) -> _Expected:
        key = receive.consumer.stage, receive.consumer.microbatch
        forward = receive.consumer.kind == F
        shape = self._channels.ask(receive.peer) if forward else lambda: self._sent.pop(key)
        self._expected.append(_Expected(receive.peer, shape))
        return self._expected[-1]

    def settle(self) -> None:
        for expected in self._expected:
            message = replace(self._message, shape=tuple(expected.shape()))
            expected.incoming = self._channels.post(message, expected.peer)
        self._expected.clear()


@dataclass(eq=False)
class _Expected:
    """A receive that is posted when its shape is known.

    Attributes:
        peer: that it comes from.
        shape: waits for it.
        incoming: once it is posted.
    """

    peer: int
    shape: Callable[[], Sequence[int]]
    incoming: Incoming | None = None

    def wait(self) -> torch.Tensor:
        """Return the tensor, arrived."""
        assert self.incoming is not None, 'settled before'
        return self.incoming.wait()


def _in_words(output: object) -> str:
    if isinstance(output, torch.Tensor):
        return f'{tuple(output.shape)} of {output.dtype}'
    return f'{output!r:.80}'
