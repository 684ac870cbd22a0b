"""The parameters after a step that may not stand, made without taking the step.

A few parameters at a time are stepped by the optimizer itself, read, and set back with their state:
so the true step is taken later from the very state that a synchronous one would have met, whatever
the optimizer keeps there. It costs one step's time and a buffer of the largest few parameters.
(The paper undoes the step by arithmetic instead, which is exact for no optimizer.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

BUFFER_BYTES = 64 << 20


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
        with torch.no_grad():
            for part in _parts(optimizer, stepped, buffer_bytes):
                self._step(optimizer, part)

    def _step(self, optimizer: torch.optim.Optimizer, part: Sequence[Stepped]) -> None:
        aside = [(s.parameter.detach().clone(), _copy(optimizer, s.parameter)) for s in part]
        self.peak_bytes = max(
            self.peak_bytes, sum(_bytes([value, *state.values()]) for value, state in aside)
        )
        with _only(optimizer, [s.parameter for s in part]):
            optimizer.step()
        for (parameter, read), (value, state) in zip(part, aside, strict=True):
            if read is None:  # the model needs the new one: the old one waits on the host
                self._kept.append((parameter, value.to('cpu')))
            else:
                read.copy_(parameter)
                parameter.copy_(value)
            _restore(optimizer, parameter, state)

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
                parameter.copy_(value)
        self._kept.clear()

    @torch.no_grad()
    def restore_copies(self) -> None:
        """The model reads what the parameters are now."""
        for parameter, read in self._stepped:
            if read is not None:
                read.copy_(parameter)


def _parts(
    optimizer: torch.optim.Optimizer, stepped: Iterable[Stepped], buffer_bytes: int
) -> Iterator[list[Stepped]]:
    """Consecutive parameters whose state fits the buffer; at least one."""
    part: list[Stepped] = []
    filled = 0
    for one in stepped:
        size = _bytes([one.parameter, *optimizer.state.get(one.parameter, {}).values()])
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


def _copy(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    state = optimizer.state.get(parameter, {})
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _restore(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, aside: dict[str, Any]
) -> None:
    state = optimizer.state.get(parameter, {})
    for name in list(state):
        if name not in aside:
            del state[name]  # made by its first step
        elif isinstance(state[name], torch.Tensor):
            state[name].copy_(aside[name])
        else:
            state[name] = aside[name]
    if not aside:
        optimizer.state.pop(parameter, None)


def _bytes(values: Iterable[Any]) -> int:
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
