"""Refuse forwards that write to their modules: of a later batch they come before a batch's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_zbpp.post_validation.watch import digest, summary

_State = dict[str, tuple[torch.Tensor, int, torch.Tensor | None]]


class Unwritten:
    """The parameters and buffers of a chunk, persistent or not, which forwards leave as they are.

    Args:
        model: the chunk.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [*model.named_modules()]

    @contextmanager
    def forward(self, hashed: bool) -> Iterator[None]:
        """Compare behind a forward; `hashed`: and values of buffers, which wait for the device.

        Raises:
            NotImplementedError: names what the forward has written.
        """
        before = self._state(hashed)
        yield
        now = self._state(hashed)
        names = [name for name in now if name not in before or _differ(before[name], now[name])]
        if names:
            raise NotImplementedError(
                f'{summary(names)}, which a forward writes, is unsupported, because forwards of '
                'the next batch run before the optimizer step of this one, which would find what '
                'they have left: keep such state out of forwards, or take a synchronous schedule, '
                'such as zb-v'
            )

    def _state(self, hashed: bool) -> _State:
        """Return tensors, how often they were written, and of buffers a number of their values."""
        return {
            f'{path}.{name}': (each, each._version, digest(each) if hashed and buffers else None)
            for path, module in self._modules
            for buffers, own in enumerate((module._parameters, module._buffers))
            for name, each in own.items()
            if each is not None
        }


def _differ(before: tuple, now: tuple) -> bool:
    """Return whether a tensor is another one, or written."""
    (tensor, version, value), (tensor_now, version_now, value_now) = before, now
    if tensor is not tensor_now or version != version_now:
        return True
    return value is not None and not torch.equal(value, value_now)
