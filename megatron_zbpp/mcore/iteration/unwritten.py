"""Refuse forwards that write to their modules: of a later batch they come before a batch's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_zbpp.post_validation.watch import digest, summary

# an object, a number that tells of changes of it, and another one
_Mark = tuple[Any, float, torch.Tensor | None]

_LOOKED_AT = range(1, 11)  # forwards of a chunk behind which values are compared
_WARM_UP = 2  # of these, in which modules may set what stays as it is from then on
# what Megatron's layers write in each forward, and the next one alone reads
_OF_ONE_FORWARD = {'input_tensor', 'current_microbatch'}


class Unwritten:
    """A chunk whose forwards leave parameters, buffers and counts as they are."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [*model.named_modules()]
        self._forwards = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Compare behind a forward; behind the first ones values, too, which wait for the device.

        Raises:
            NotImplementedError: names what the forward has written.
        """
        self._forwards += 1
        look = self._forwards in _LOOKED_AT
        tensors, counts = self._tensors(look), self._counts(look)
        yield
        names = [
            name
            for name, mark in self._tensors(look).items()
            if name not in tensors or _differ(tensors[name], mark)
        ]
        if self._forwards > _WARM_UP:
            now = self._counts(look).items()
            names += [each for each, mark in now if each in counts and _differ(counts[each], mark)]
        if names:
            raise NotImplementedError(
                f'{summary(names)}, which a forward writes, is unsupported, because forwards of '
                'the next batch run before the optimizer step of this one, which would find what '
                'they have left: keep such state out of forwards, or take a synchronous schedule, '
                'such as zb-v'
            )

    def _tensors(self, look: bool) -> dict[str, _Mark]:
        """Return parameters and buffers."""
        return {
            f'{path}.{name}': (each, each._version, digest(each) if look and buffers else None)
            for path, module in self._modules
            for buffers, own in enumerate((module._parameters, module._buffers))
            for name, each in own.items()
            if each is not None
        }

    def _counts(self, look: bool) -> dict[str, _Mark]:
        """Return other tensors, numbers and collections that modules have."""
        return {
            f'{path}.{name}': mark
            for path, module in (self._modules if look else ())
            for name, value in vars(module).items()
            if name[0] != '_' and name not in _OF_ONE_FORWARD and (mark := _mark(value)) is not None
        }


def _mark(value: object) -> _Mark | None:
    if isinstance(value, torch.Tensor):
        return value, value._version, None
    if isinstance(value, list | dict | set):
        return value, len(value), None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None, value, None
    return None


def _differ(before: _Mark, now: _Mark) -> bool:
    """Return whether it is another object, or written."""
    if before[0] is not now[0] or before[1] != now[1]:
        return True
    return before[2] is not None and now[2] is not None and not torch.equal(before[2], now[2])
