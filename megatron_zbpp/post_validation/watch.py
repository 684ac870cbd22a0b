"""Notices what a program changes of modules between an optimizer step and the next iteration.

Version counters, addresses and settings are compared each time. They miss what is written through
`.data`, through a flat buffer that parameters are views of, and by fused optimizers: that changes a
digest of the values, which costs a pass over them and is taken now and then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch

_ROW = 32  # words that are added up at once: fewer take longer, more hide more exchanges
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's, as a signed number
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
MODES = 'train() or eval(), or forward hooks'


class Watched:
    """Modules to watch, and by name the flat memory that their parameters are views of."""

    def __init__(
        self, modules: Sequence[torch.nn.Module], flat: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> None:
        named = [
            (name if len(modules) == 1 else f'chunk {chunk}: {name}', tensor)
            for chunk, module in enumerate(modules)
            for found in (module.named_parameters(), module.named_buffers())
            for name, tensor in found
        ]
        self.names = [name for name, _ in named]
        self.tensors = tuple(tensor for _, tensor in named)
        self._flat = tuple(flat)
        self._modules = [each for module in modules for each in module.modules()]

    def marks(self) -> list[tuple[str, object]]:
        """Return name, version, address and mode of each tensor: they tell of most changes.

        Of the memory that parameters are views of it is name and version.
        """
        tensors = zip(self.names, self.tensors, strict=True)
        own = [(name, (t._version, t.data_ptr(), t.requires_grad)) for name, t in tensors]
        return [*own, *((name, tensor._version) for name, tensor in self._flat)]

    def modes(self) -> list[tuple]:
        """Return mode and number of hooks of each module."""
        return [
            (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in self._modules
        ]

    def digests(self) -> torch.Tensor:
        """Return a number of each tensor's values, on their device; never waits for it."""
        return torch.stack([digest(tensor) for tensor in self.tensors])


class Watch:
    """The modules of `watched` as they are now; values, too, if `hashed`."""

    def __init__(
        self,
        watched: Watched,
        hashed: bool,
        unseen: Callable[[tuple[torch.Tensor, ...]], AbstractContextManager[None]],
    ) -> None:
        self._watched = watched
        self._unseen = ExitStack()
        self._unseen.enter_context(unseen(watched.tensors))
        self._marks, self._modes = watched.marks(), watched.modes()
        self._digests = watched.digests() if hashed else None
        self._differ: torch.Tensor | None = None

    def changes(self) -> list[str]:
        """Return names of what the host sees that has changed."""
        pairs = zip(self._marks, self._watched.marks(), strict=True)
        found = [name for (name, before), (_, now) in pairs if before != now]
        return found + [MODES] * (self._modes != self._watched.modes())

    def differ(self) -> torch.Tensor | None:
        """Return one bool on the device, True if values have changed; None: they are not hashed."""
        if self._digests is None:
            return None
        self._differ = self._watched.digests() != self._digests
        return self._differ.any()

    def different(self) -> list[str]:
        """Return names of tensors whose values had changed at `differ`; waits for the device."""
        if self._differ is None:
            return []
        names = zip(self._watched.names, self._differ.tolist(), strict=True)
        return [name for name, differs in names if differs]

    def hide(self) -> None:
        """Let graphs run back whose saved tensors have been written to since."""
        self._unseen.close()


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that changes with any value of `tensor`, or with their order.

    It is a sum of rows of the memory's words, each with another odd factor: whole numbers, so that
    no change is rounded away. It does not tell the order of words in a row, for which it would have
    to read them twice.
    """
    words = _words(tensor)
    rows = words.numel() // _ROW
    whole = words[: rows * _ROW].view(rows, _ROW)
    parts = torch.cat([whole.sum(1, dtype=torch.int64), words[rows * _ROW :].to(torch.int64)])
    return (parts * _factors(parts.numel(), parts.device)).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as whole numbers, as long as its size and place allow."""
    flat = tensor.detach().contiguous().view(-1)
    offset = flat.storage_offset() * flat.element_size()
    return flat.view(_WORDS[math.gcd(flat.nbytes, offset, 8) or 8])


@functools.lru_cache
def _factors(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device) * _ODD


def any_bits(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if a tensor has a value other than zero; waits for the device."""
    # in half the time that `any` takes
    return any(bool(_words(tensor).count_nonzero()) for tensor in tensors)


def summary(names: Sequence[str]) -> str:
    """Return the first two of some names, and how many more there are."""
    return ', '.join(names[:2]) + (f' and {len(names) - 2} more' if len(names) > 2 else '')
