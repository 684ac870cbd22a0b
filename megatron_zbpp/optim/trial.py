"""The parameters after a step that may not stand, made without taking the step.

A few parameters at a time, the optimizer steps copies of them and of its state, and the model reads
what came out: so the true step is taken later from the very state that a synchronous one would have
met, whatever the optimizer keeps there. It costs one step's time, the copies', and a buffer of a
few parameters. (The paper undoes the step by arithmetic instead, which is exact for no optimizer.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

BUFFER_BYTES = 64 << 20
_ALIGNMENT = 512  # bytes: of tensors that kernels like best


class Stepped(NamedTuple):
    """A parameter of an optimizer, and what the model computes with.

    Attributes:
        parameter: that the optimizer steps.
        read: its copy in the model, of another type; None: the model reads the parameter itself.
    """

    parameter: torch.Tensor
    read: torch.Tensor | None


class Trial:
    """Puts stepped parameters into the model; `undo` takes out what the optimizer must find.

    Args:
        optimizer: whose gradients are ready. Its step must treat each parameter by itself.
        stepped: all of its parameters that have gradients.
        buffer_bytes: how much state is set aside at once, if one parameter needs no more.

    Attributes:
        peak_bytes: most that was set aside at once.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stepped: Sequence[Stepped],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.peak_bytes = 0
        self._stepped = stepped
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        parts = list(_parts(optimizer, stepped, buffer_bytes))
        self.peak_bytes = max(
            (sum(_bytes(optimizer, s) for s in part) for part in parts), default=0
        )
        if parts:
            buffer = _Buffer(self.peak_bytes, stepped[0].parameter.device)
            with torch.no_grad():
                for part in parts:
                    self._step(optimizer, part, buffer)

    def _step(
        self, optimizer: torch.optim.Optimizer, part: Sequence[Stepped], buffer: _Buffer
    ) -> None:
        states = [optimizer.state.get(s.parameter) for s in part]
        values = [s.parameter.data for s in part]
        buffer.clear()
        for (parameter, read), state in zip(part, states, strict=True):
            if state is not None:
                optimizer.state[parameter] = {name: buffer.copy(v) for name, v in state.items()}
            if read is None:  # the model needs the new one in its place: the old waits on the host
                self._kept.append((parameter, _aside(parameter)))
            else:
                parameter.data = buffer.copy(parameter.data)
        with _only(optimizer, [s.parameter for s in part]):
            optimizer.step()
        for (parameter, read), state, value in zip(part, states, values, strict=True):
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = state
            if read is not None:
                read.copy_(parameter)
                parameter.data = value

    @property
    def in_place(self) -> list[torch.Tensor]:
        """Parameters that the model reads themselves."""
        return [parameter for parameter, _ in self._kept]

    @torch.no_grad()
    def undo(self) -> None:
        """Optimizer and parameters are as before the trial; what the model reads of others is not.

        Saved activations keep the parameters that they were computed with: a step that stands
        writes the same values again, so autograd is not told of a change.
        """
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.in_place)):
            for parameter, value in self._kept:
                parameter.copy_(value, non_blocking=True)
        self._kept.clear()

    @torch.no_grad()
    def restore_copies(self) -> None:
        """The model reads what the parameters are now."""
        for parameter, read in self._stepped:
            if read is not None:
                read.copy_(parameter)


def _aside(parameter: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, which the host itself never reads: so it need not wait for it.

    A GPU copies to and from page-locked memory in the order of its stream; PyTorch keeps such
    memory until the stream is done with it, and uses it again for the next step.
    """
    locked = parameter.device.type == 'cuda'
    copy = torch.empty_like(parameter, device='cpu', requires_grad=False, pin_memory=locked)
    return copy.copy_(parameter.detach(), non_blocking=True)


def _parts(
    optimizer: torch.optim.Optimizer, stepped: Iterable[Stepped], buffer_bytes: int
) -> Iterator[list[Stepped]]:
    """Consecutive parameters whose state fits the buffer; at least one."""
    part: list[Stepped] = []
    filled = 0
    for one in stepped:
        size = _bytes(optimizer, one)
        if part and filled + size > buffer_bytes:
            yield part
            part, filled = [], 0
        part.append(one)
        filled += size
    if part:
        yield part


@contextmanager
def _only(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """The optimizer steps these only; its groups, which some keep a step count in, stay as is."""
    chosen = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    restricted = [
        {**group, 'params': [p for p in group['params'] if id(p) in chosen]} for group in groups
    ]
    optimizer.param_groups = [group for group in restricted if group['params']]
    try:
        yield
    finally:
        optimizer.param_groups = groups


class _Buffer:
    """Memory for copies, used over and over."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0

    def clear(self) -> None:
        """What was copied is no longer needed."""
        self._used = 0

    def copy(self, value: Any) -> Any:
        """A copy of a tensor; what is none, or elsewhere, is small."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.device != self._memory.device:
            return value.clone()
        place = self._memory[self._used : self._used + value.nbytes]
        self._used += _aligned(value.nbytes)
        return place.view(value.dtype).view(value.shape).copy_(value)


def _bytes(optimizer: torch.optim.Optimizer, stepped: Stepped) -> int:
    """What copies of a parameter and its state take."""
    parameter, state = stepped.parameter, optimizer.state.get(stepped.parameter, {})
    tensors = (v for v in (parameter, *state.values()) if isinstance(v, torch.Tensor))
    return sum(_aligned(v.nbytes) for v in tensors)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
