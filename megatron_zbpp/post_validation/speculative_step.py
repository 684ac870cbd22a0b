"""The parameters after a step that may not stand.

There are two ways. Where a buffer can hold what was there before, the optimizer steps: if the step
stands it has been taken, else the old values come back. That costs the copies' time beside that of
the step. Of what does not fit, a few parameters at a time, the optimizer steps copies, and the
model reads what came out: the true step is taken later, from the very state that a synchronous one
would have met. That costs another step's time. (The paper undoes the step by arithmetic instead,
which is exact for no optimizer.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

BUFFER_BYTES = 64 << 20
KEPT_BYTES = 256 << 20
_ALIGNMENT = 512  # bytes: of tensors that kernels like best


class Stepped(NamedTuple):
    """A parameter of an optimizer, and what the model computes with."""

    parameter: torch.Tensor  # that the optimizer steps
    # its copy in the model, of another type; None: the model reads the parameter itself
    read: torch.Tensor | None


class _Before(NamedTuple):
    """A parameter and its state before the step."""

    stepped: Stepped  # the parameter
    value: torch.Tensor  # a copy of it
    # what the optimizer had for it, in the optimizer's own tensors; None: nothing
    state: dict[str, Any] | None
    copies: dict[str, torch.Tensor]  # of its tensors

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        parameter = self.stepped.parameter
        parameter.copy_(self.value)
        if self.state is None:
            optimizer.state.pop(parameter, None)
            return
        for name, copy in self.copies.items():
            self.state[name].copy_(copy)
        optimizer.state[parameter] = self.state


class SpeculativeStep:
    """Puts stepped parameters into the model.

    Then `undo` comes, and when it is known whether the step stands, `complete` or `give_back`.
    """

    @torch.no_grad()
    def __init__(
        self,
        # whose gradients are ready; its step must treat each parameter by itself
        optimizer: torch.optim.Optimizer,
        stepped: Sequence[Stepped],  # all of its parameters that have gradients
        # state that is set aside at once, if one parameter needs no more, of parameters that take
        # the true step later
        buffer_bytes: int = BUFFER_BYTES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._optimizer = optimizer
        self._stepped = stepped
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before: list[_Before] = []
        self._groups: list[tuple[dict, dict]] = []
        self.kept_bytes = self._step(kept_bytes)  # how much of old state is kept
        later = stepped[len(self._before) :]
        parts = list(_parts(optimizer, later, buffer_bytes))
        largest = max((sum(_bytes(optimizer, s) for s in part) for part in parts), default=0)
        self.peak_bytes = self.kept_bytes + largest  # most that was set aside at once
        if parts:
            buffer = _Buffer(largest, later[0].parameter.device)
            for part in parts:
                self._step_copies(part, buffer)

    def _step(self, most: int) -> int:
        """Step the first parameters, whose old values take `most` bytes; how many they take."""
        optimizer, size, fitting = self._optimizer, 0, []
        for one in self._stepped:
            if size + _bytes(optimizer, one) > most:
                break
            size += _bytes(optimizer, one)
            fitting.append(one)
        if not fitting:
            return 0
        for one in fitting:
            state = optimizer.state.get(one.parameter)
            tensors = {n: v for n, v in (state or {}).items() if isinstance(v, torch.Tensor)}
            copies = {name: value.clone() for name, value in tensors.items()}
            own = None if state is None else dict(state)
            self._before.append(_Before(one, one.parameter.detach().clone(), own, copies))
        with _only(optimizer, {id(one.parameter) for one in fitting}) as self._groups:
            optimizer.step()
        for parameter, read in fitting:
            if read is not None:
                read.copy_(parameter)
        return size

    def _step_copies(self, part: Sequence[Stepped], buffer: _Buffer) -> None:
        optimizer = self._optimizer
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
        with _only(optimizer, {id(s.parameter) for s in part}):
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
        """Parameters that the model reads themselves and the true step is to step."""
        return [parameter for parameter, _ in self._kept]

    @torch.no_grad()
    def undo(self) -> None:
        """Let the optimizer find all as before that have not taken the step.

        Saved activations keep the parameters that they were computed with: a step that stands
        writes the same values again, so autograd is not told of a change, by way of `data`.
        """
        for parameter, value in self._kept:
            parameter.data.copy_(value, non_blocking=True)
        self._kept.clear()

    def complete(self, step: Callable[[], Any]) -> Any:
        """Take the step, which was right, by `step` for parameters that have not taken it."""
        taken = {id(before.stepped.parameter) for before in self._before}
        if not taken:
            return step()
        everything = {id(p) for group in self._optimizer.param_groups for p in group['params']}
        with _only(self._optimizer, everything - taken, empty=True) as groups:
            result = step() if groups else None
        self._before.clear()
        for group, stepped in [*self._groups, *groups]:  # some keep a step count there
            group.update({name: v for name, v in stepped.items() if name != 'params'})
        return result

    @torch.no_grad()
    def give_back(self) -> None:
        """Take the step back, which was wrong: the optimizer finds all as before."""
        for before in self._before:
            before.restore(self._optimizer)
        self._before.clear()

    @torch.no_grad()
    def restore_copies(self) -> None:
        """Let the model read what the parameters are now."""
        for parameter, read in self._stepped:
            if read is not None:
                read.copy_(parameter)


def _aside(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy in page-locked memory, made in the stream's order: the host never reads it."""
    locked = parameter.device.type == 'cuda'
    copy = torch.empty_like(parameter, device='cpu', requires_grad=False, pin_memory=locked)
    return copy.copy_(parameter.detach(), non_blocking=True)


def _parts(
    optimizer: torch.optim.Optimizer, stepped: Iterable[Stepped], buffer_bytes: int
) -> Iterator[list[Stepped]]:
    """Yield consecutive parameters whose state fits the buffer; at least one."""
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
def _only(
    optimizer: torch.optim.Optimizer, chosen: set[int], empty: bool = False
) -> Iterator[list[tuple[dict, dict]]]:
    """Let the optimizer step these only; its groups, which some count steps in, stay as is."""
    groups = optimizer.param_groups
    own = [[p for p in group['params'] if id(p) in chosen] for group in groups]
    restricted = [
        (group, {**group, 'params': its})
        for group, its in zip(groups, own, strict=True)
        if its or (empty and not group['params'])
    ]
    optimizer.param_groups = [its for _, its in restricted]
    try:
        yield restricted
    finally:
        optimizer.param_groups = groups


class _Buffer:
    """Memory for copies, used over and over."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0

    def clear(self) -> None:
        self._used = 0

    def copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device != self._memory.device:
            return value.clone()
        place = self._memory[self._used : self._used + value.nbytes]
        self._used += _aligned(value.nbytes)
        return place.view(value.dtype).view(value.shape).copy_(value)


def _bytes(optimizer: torch.optim.Optimizer, stepped: Stepped) -> int:
    parameter, state = stepped.parameter, optimizer.state.get(stepped.parameter, {})
    tensors = (v for v in (parameter, *state.values()) if isinstance(v, torch.Tensor))
    return sum(_aligned(v.nbytes) for v in tensors)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
