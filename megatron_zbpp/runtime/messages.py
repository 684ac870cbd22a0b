"""Messages between neighbouring stages, checked before they leave: of one shape, or of any.

Megatron's `variable_seq_lengths` lets each microbatch have a length of its own. Then the shape of
what a forward sends is told ahead of it, on the host; a gradient has the shape of what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import NamedTuple, Protocol, TypeGuard

import torch

from megatron_zbpp.analysis.program import Hand, Receive, Send
from megatron_zbpp.ir import F
from megatron_zbpp.runtime.actions import Tensors
from megatron_zbpp.runtime.channels import Channels, Incoming, Message
from megatron_zbpp.runtime.key import Key, key_of

_ALIGNED = 16  # bytes: where a tensor of any dtype may begin


class Awaited(Protocol):
    """A message that is on its way."""

    def wait(self) -> Tensors:
        """Return the tensor, arrived."""
        ...


class Messages(Protocol):
    """The protocol by which the executor sends and receives."""

    def checked(self, output: object, instruction: Send | Hand) -> Tensors:
        """Return `output`, which goes to another stage, if it is a message.

        Raises:
            ValueError: it is another tensor, or none.
        """
        ...

    def send(self, output: Tensors, send: Send) -> None:
        """Start sending it."""

    def post(self, receive: Receive) -> Awaited:
        """Post a receive, or at the next `settle`."""
        ...

    def settle(self) -> None:
        """Return once all receives are posted; called before each pass."""


def messages(
    channels: Channels,
    message: Message | Sequence[Message],
    others: Mapping[str, Message | tuple[Message, ...]],
) -> Messages:
    """Return messages of fixed shapes, or of any shape where `message` has none.

    Args:
        channels: to the neighbours.
        message: what stages exchange; of each slice of a sequence, where there are several.
        others: by name, of messages that differ: a tuple of them is several tensors, sent as one.
    """
    if not isinstance(message, Message):
        if others:
            raise NotImplementedError(
                f'messages {", ".join(sorted(others))} beside those of slices of a sequence'
            )
        return BySlice(channels, message)
    if message.shape is not None:
        return ByName(channels, message, others) if others else FixedShape(channels, message)
    if others:
        raise NotImplementedError(
            f'messages {", ".join(sorted(others))} beside some whose shapes vary: give the '
            'pipeline one shape'
        )
    return VariableShape(channels, message)


class FixedShape:
    """Messages of one shape: all is known of them before they are sent."""

    def __init__(self, channels: Channels, message: Message) -> None:
        self._channels, self._message = channels, message

    def checked(self, output: object, instruction: Send | Hand) -> Tensors:
        expected = self._expected(instruction)
        if _fits(output, expected):
            return output
        raise _misfit(output, instruction, (expected,))

    def send(self, output: Tensors, send: Send) -> None:
        self._channels.send(output, send)  # pyright: ignore[reportArgumentType]  # it is checked

    def post(self, receive: Receive) -> Awaited:
        return self._channels.post(self._expected(receive), receive.peer)

    def settle(self) -> None:
        pass  # they are posted at once

    def _expected(self, instruction: Send | Hand | Receive) -> Message:
        return self._message


class BySlice(FixedShape):
    """Messages of slices of a sequence, each of which has one shape."""

    def __init__(self, channels: Channels, of_slices: Sequence[Message]) -> None:
        super().__init__(channels, of_slices[0])
        self._of_slices = of_slices

    def _expected(self, instruction: Send | Hand | Receive) -> Message:
        return self._of_slices[instruction.producer.slice]


class ByName(FixedShape):
    """Messages of fixed shapes, which some names have of their own."""

    def __init__(
        self,
        channels: Channels,
        message: Message,
        others: Mapping[str, Message | tuple[Message, ...]],
    ) -> None:
        super().__init__(channels, message)
        self._others = others

    def checked(self, output: object, instruction: Send | Hand) -> Tensors:
        expected = self._of(instruction)
        if not isinstance(expected, tuple):
            if _fits(output, expected):
                return output
            raise _misfit(output, instruction, (expected,))
        if _all_fit(output, expected):
            return output
        raise _misfit(output, instruction, expected)

    def send(self, output: Tensors, send: Send) -> None:
        self._channels.send(packed(output) if isinstance(output, tuple) else output, send)

    def post(self, receive: Receive) -> Awaited:
        expected = self._of(receive)
        if not isinstance(expected, tuple):
            return self._channels.post(expected, receive.peer)
        whole = Message((_layout(expected)[-1],), torch.uint8, expected[0].device)
        return _Packed(self._channels.post(whole, receive.peer), expected)

    def _of(self, instruction: Send | Hand | Receive) -> Message | tuple[Message, ...]:
        return self._others.get(instruction.message, self._message)


def _misfit(output: object, instruction: Send | Hand, expected: Sequence[Message]) -> ValueError:
    return ValueError(
        f'{instruction.producer.words} made {_in_words(output)}, but '
        f'{instruction.consumer.words} takes '
        f'{" and ".join(f"{each.shape} of {each.dtype}" for each in expected)}: every stage must '
        'keep the shape that sequence length, micro batch and hidden size give, and the dtype of '
        'the pipeline'
    )


def packed(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return several tensors as the bytes of one: one message on the wire."""
    places = _layout([Message(tuple(t.shape), t.dtype, t.device) for t in tensors])
    whole = torch.empty(places[-1], dtype=torch.uint8, device=tensors[0].device)
    for start, tensor in zip(places, tensors, strict=False):
        part = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole[start : start + part.numel()] = part
    return whole


def _layout(parts: Sequence[Message]) -> list[int]:
    sizes = [prod(each.shape or ()) * each.dtype.itemsize for each in parts]
    padded = (-(-size // _ALIGNED) * _ALIGNED for size in sizes)
    return list(accumulate(padded, initial=0))


class _Packed(NamedTuple):
    """Several tensors that come as one."""

    whole: Incoming  # their bytes
    parts: tuple[Message, ...]  # shape and dtype of each

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors, arrived."""
        whole = self.whole.wait()
        return tuple(
            whole[start : start + prod(each.shape or ()) * each.dtype.itemsize]
            .view(each.dtype)
            .view(each.shape or ())
            for start, each in zip(_layout(self.parts), self.parts, strict=False)
        )


def _fits(output: object, message: Message) -> TypeGuard[torch.Tensor]:
    shape, dtype = message.shape, message.dtype
    return isinstance(output, torch.Tensor) and output.shape == shape and output.dtype == dtype


def _all_fit(output: object, messages: tuple[Message, ...]) -> TypeGuard[tuple[torch.Tensor, ...]]:
    if not isinstance(output, tuple) or len(output) != len(messages):
        return False
    return all(map(_fits, output, messages))


class VariableShape:
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
        self._sent: dict[Key, torch.Size] = {}
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

    def send(self, output: Tensors, send: Send) -> None:
        assert isinstance(output, torch.Tensor), 'messages of several tensors have fixed shapes'
        if send.consumer.kind == F:
            self._sent[key_of(send.producer)] = output.shape
            self._channels.tell(output.shape, send)
        self._channels.send(output, send)

    def post(self, receive: Receive) -> _Expected:
        key = key_of(receive.consumer)
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
    """A receive that is posted when its shape is known."""

    peer: int  # that it comes from
    shape: Callable[[], Sequence[int]]  # waits for it
    incoming: Incoming | None = None  # once it is posted

    def wait(self) -> torch.Tensor:
        """Return the tensor, arrived."""
        assert self.incoming is not None, 'settled before'
        return self.incoming.wait()


def _in_words(output: object) -> str:
    if isinstance(output, torch.Tensor):
        return f'{tuple(output.shape)} of {output.dtype}'
    return f'{output!r:.80}'
