"""Messages between neighbouring stages, checked before they leave.

They have one shape, or one for each part of a sequence, name or edge, or any shape.

Megatron's `variable_seq_lengths` lets each microbatch have a length of its own. Then the shape of
what a forward sends is told ahead of it, on the host; a gradient has the shape of what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import NamedTuple, Protocol, TypeGuard, cast

import torch

from megatron_zbpp.analysis.program import Hand, Receive, Send
from megatron_zbpp.ir import F
from megatron_zbpp.runtime.channels import Channels, Incoming, Message
from megatron_zbpp.runtime.stage import Key, Tensors, key_of

_ALIGNED = 16  # bytes: where a tensor of any dtype may begin

Hop = tuple[Message, ...]
"""Tensors that one stage sends to the next; gradients go back of those of floating point."""

_Instruction = Send | Hand | Receive


class Awaited(Protocol):
    """A message that is on its way."""

    def wait(self) -> Tensors:
        """Return the tensor, arrived."""
        ...


def messages(
    channels: Channels,  # to the neighbours
    # what stages exchange; of each part of a sequence, where there are several
    message: Message | Sequence[Message],
    # by name, of messages that differ: a tuple of them is several tensors, sent as one
    others: Mapping[str, Message | Hop],
    edges: Mapping[int, Hop] | None = None,  # by the stage that sends forwards, where hops differ
) -> FixedShape | VariableShape:
    """Return messages of fixed shapes, or of any shape where `message` has none."""
    if edges:
        return FixedShape(channels, partial(_of_edge, edges))
    named = ', '.join(sorted(others))
    if not isinstance(message, Message):
        if others:
            raise NotImplementedError(f'messages {named} beside those of slices of a sequence')
        return FixedShape(channels, lambda instruction: message[instruction.producer.slice])
    if message.shape is not None:
        return FixedShape(channels, lambda instruction: others.get(instruction.message, message))
    if others:
        raise NotImplementedError(
            f'messages {named} beside some whose shapes vary: give the pipeline one shape'
        )
    return VariableShape(channels, message)


def _of_edge(edges: Mapping[int, Hop], instruction: _Instruction) -> Message | Hop:
    forward = instruction.consumer.kind == F
    hop = edges[(instruction.producer if forward else instruction.consumer).stage]
    if len(hop) == 1:
        return hop[0]
    return hop if forward else tuple(each for each in hop if each.dtype.is_floating_point)


class FixedShape:
    """Messages of known shapes: all is known of them before they are sent."""

    def __init__(
        self, channels: Channels, expected: Callable[[_Instruction], Message | Hop]
    ) -> None:
        self._channels = channels  # to the neighbours
        self._expected = expected  # returns what an instruction carries

    def checked(self, output: object, instruction: Send | Hand) -> Tensors:
        """Return `output`, which goes to another stage; ValueError: another shape or type."""
        expected = self._expected(instruction)
        if not isinstance(expected, tuple):
            if _fits(output, expected):
                return output
            expected = (expected,)
        elif isinstance(output, tuple) and len(output) == len(expected):
            parts = cast('tuple[object, ...]', output)
            if all(map(_fits, parts, expected)):
                return output
        raise _mismatch(
            output,
            instruction,
            ' and '.join(f'{each.shape} of {each.dtype}' for each in expected),
            'every stage must keep the shape that sequence length, micro batch and hidden size '
            'give, and the dtype of the pipeline',
        )

    def send(self, output: Tensors, send: Send) -> None:
        self._channels.send(packed(output) if isinstance(output, tuple) else output, send)

    def post(self, receive: Receive) -> Awaited:
        """Post a receive, or at the next `settle`."""
        expected = self._expected(receive)
        if not isinstance(expected, tuple):
            return self._channels.post(expected, receive.peer)
        whole = Message((_layout(expected)[-1],), torch.uint8, expected[0].device)
        return _Packed(self._channels.post(whole, receive.peer), expected)

    def settle(self) -> None:
        """Return once all receives are posted, as they are at once; called before each pass."""


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


class VariableShape:
    """Messages of any shape.

    A receive is posted right before the next pass, when its shape has come. Where a pass waits for
    its device, it waits for all receives before it, too, and so for the senders of these: what the
    checker has proven of that rule holds for waiting here.
    """

    def __init__(self, channels: Channels, message: Message) -> None:
        self._channels = channels  # to the neighbours; they can tell shapes
        self._message = message  # what is exchanged, without its shape
        self._sent: dict[Key, torch.Size] = {}
        self._expected: list[_Expected] = []

    def checked(self, output: object, instruction: Send | Hand) -> torch.Tensor:
        dtype = self._message.dtype
        if isinstance(output, torch.Tensor) and output.dtype == dtype:
            return output
        rule = 'every stage must keep the dtype of the pipeline'
        raise _mismatch(output, instruction, f'a tensor of {dtype}', rule)

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
        assert self.incoming is not None, 'settled before'
        return self.incoming.wait()


def _mismatch(output: object, instruction: Send | Hand, expected: str, rule: str) -> ValueError:
    made = _in_words(output)
    return ValueError(
        f'{instruction.producer.words} made {made}, but {instruction.consumer.words} takes '
        f'{expected}: {rule}'
    )


def _in_words(output: object) -> str:
    if isinstance(output, torch.Tensor):
        return f'{tuple(output.shape)} of {output.dtype}'
    return f'{output!r:.80}'
