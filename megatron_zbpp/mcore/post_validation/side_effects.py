"""What forwards leave behind outside of their results: for those that may be dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.left_behind import emptied, random_states, set_random_states


@dataclass
class SideEffects:
    """Those of forwards that run before their iteration begins: seen when it begins, or never.

    Args:
        models: the chunks of this rank.
    """

    models: list[torch.nn.Module]
    _random: tuple = ()
    _losses: dict[str, Any] = field(default_factory=dict)
    _mtp_losses: dict[str, Any] = field(default_factory=dict)
    _buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Leave random states and logged losses as they were; keep what becomes of them."""
        states = random_states()
        self._buffers = [(b, b.detach().clone()) for m in self.models for _, b in m.named_buffers()]
        losses, mtp_losses = compat.logged_losses(), compat.logged_mtp_losses()
        try:
            with emptied(losses), emptied(mtp_losses):
                yield
                self._random = random_states()
                self._losses, self._mtp_losses = dict(losses), dict(mtp_losses)
        finally:
            set_random_states(*states)

    def commit(self) -> None:
        """Make all as if they had just run: their iteration begins.

        What is shown has been cleared since: nothing is rounded by a sum.
        """
        set_random_states(*self._random)
        losses = compat.logged_losses()
        for name, entry in self._losses.items():
            if name in losses:
                shown = compat.logged_values(losses[name])
                shown.add_(compat.logged_values(entry))
            else:
                losses[name] = entry
        mtp_losses = compat.logged_mtp_losses()
        for name, entry in self._mtp_losses.items():
            if isinstance(mtp_losses.get(name), torch.Tensor):
                mtp_losses[name].add_(entry)
            else:
                mtp_losses[name] = entry

    @torch.no_grad()
    def rollback(self) -> None:
        """Make all as if they had never run."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
