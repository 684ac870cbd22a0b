"""What forwards leave behind outside of their results: for those that may be dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_zbpp.mcore import compat


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
        states = _random_states()
        self._buffers = [(b, b.detach().clone()) for m in self.models for _, b in m.named_buffers()]
        losses, mtp_losses = compat.logged_losses(), compat.logged_mtp_losses()
        try:
            with _emptied(losses), _emptied(mtp_losses):
                yield
                self._random = _random_states()
                self._losses, self._mtp_losses = dict(losses), dict(mtp_losses)
        finally:
            _set_random_states(*states)

    def commit(self) -> None:
        """Make all as if they had just run: their iteration begins.

        What is shown has been cleared since: nothing is rounded by a sum.
        """
        _set_random_states(*self._random)
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


@contextmanager
def _emptied(entries: dict[str, Any]) -> Iterator[None]:
    """Take all out of `entries` for a while; what is put in meanwhile is forgotten."""
    shown = dict(entries)
    entries.clear()
    try:
        yield
    finally:
        entries.clear()
        entries.update(shown)


def _random_states() -> tuple:
    """Return values of the host's, the device's and the tracked random states."""
    host, device, tracked = compat.random_states()
    return host, _value(device), {name: _value(state) for name, state in tracked.items()}


def _value(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    """Return a copy; trackers made for CUDA graphs, as Transformer Engine's, hold generators."""
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def _set_random_states(host: torch.Tensor, device: torch.Tensor, tracked: dict) -> None:
    """Set the values; generators stay the ones that Transformer Engine and graphs know."""
    _, held, generators = compat.random_states()
    if not isinstance(held, torch.Generator):
        compat.set_random_states(host, device, tracked)
        return
    torch.set_rng_state(host)
    held.set_state(device)
    for name, value in tracked.items():
        generators[name].set_state(value)
