"""State that a forward of Megatron's leaves outside of its result, kept and set back.

Random states, the host's, the device's and those that Megatron tracks by name; and losses that it
only logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_zbpp.mcore import compat


def random_states() -> tuple:
    """Return values of the host's, the device's and the tracked random states."""
    host, device, tracked = compat.random_states()
    return host, _value(device), {name: _value(state) for name, state in tracked.items()}


def _value(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    """Return a copy; trackers made for CUDA graphs, as Transformer Engine's, hold generators."""
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def set_random_states(host: torch.Tensor, device: torch.Tensor, tracked: dict) -> None:
    """Set the values; generators stay the ones that Transformer Engine and graphs know."""
    _, held, generators = compat.random_states()
    if not isinstance(held, torch.Generator):
        compat.set_random_states(host, device, tracked)
        return
    torch.set_rng_state(host)
    held.set_state(device)
    for name, value in tracked.items():
        generators[name].set_state(value)


def same_states(one: tuple, other: tuple) -> bool:
    """Return whether both would draw the same."""
    (host, device, tracked), (host_too, device_too, tracked_too) = one, other
    return (
        torch.equal(host, host_too)
        and torch.equal(device, device_too)
        and tracked.keys() == tracked_too.keys()
        and all(torch.equal(state, tracked_too[name]) for name, state in tracked.items())
    )


@contextmanager
def put_back() -> Iterator[None]:
    """Draw on, behind it, as if nothing had been drawn in it."""
    now = random_states()
    try:
        yield
    finally:
        set_random_states(*now)


@contextmanager
def drawing_again(states: tuple) -> Iterator[None]:
    """Draw what was drawn from `states` on; behind it, draw on as if nothing had been."""
    with put_back():
        set_random_states(*states)
        yield


@contextmanager
def emptied(entries: dict[str, Any]) -> Iterator[None]:
    """Take all out of `entries` for a while; what is put in meanwhile is forgotten."""
    shown = dict(entries)
    entries.clear()
    try:
        yield
    finally:
        entries.clear()
        entries.update(shown)


def show_losses(losses: dict[str, Any]) -> None:
    """Add what forwards have logged to what routers show; zeros where that has been shown."""
    shown = compat.logged_losses()
    for name, entry in losses.items():
        if name in shown:
            compat.logged_values(shown[name]).add_(compat.logged_values(entry))
        else:
            shown[name] = entry


def isolated(step: Callable[[], object]) -> object:
    """Return what `step` does, of which random states and logged losses have nothing left."""
    losses, mtp_losses = compat.logged_losses(), compat.logged_mtp_losses()
    with put_back(), emptied(losses), emptied(mtp_losses):
        return step()
