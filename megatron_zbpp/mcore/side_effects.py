"""State that forwards leave outside of their result: kept, set back, or put off.

That is random states (the host's, the device's and those that Megatron tracks by name), buffers,
and losses that Megatron only logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_zbpp.mcore import compat
from megatron_zbpp.runtime.compat import unseen_by_autograd

if TYPE_CHECKING:
    from megatron_zbpp.post_validation.watch import Watched

FIRST = 10  # steps or calls behind each of which values are compared


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
    """Return the result of `step`; random states and logged losses are as before it."""
    losses, mtp_losses = compat.logged_losses(), compat.logged_mtp_losses()
    with put_back(), emptied(losses), emptied(mtp_losses):
        return step()


def watched_of(models: Sequence[torch.nn.Module], with_main: bool = False) -> Watched:
    """Return the watched tensors of a rank's chunks; `with_main`: and of its optimizers."""
    from megatron_zbpp.post_validation.watch import Watched

    flat = []
    for model in models:
        # parameters are views of it: with the distributed optimizer only
        data = (buffer.param_data for buffer in compat.ddp_buffers(model))
        held = enumerate(each for each in data if each is not None)
        flat += [(f"DDP's buffer {at} of parameters", memory) for at, memory in held]
    named = [each for model in models if with_main for each in model.named_parameters()]
    mains = ((name, getattr(p, 'main_param', None)) for name, p in named)
    flat += [(f'the main copy of {name}', main) for name, main in mains if main is not None]
    return Watched(models, flat)


@dataclass
class SideEffects:
    """Side effects of forwards that run ahead: seen when their iteration begins, or never."""

    models: list[torch.nn.Module]
    _before: tuple = ()
    _random: tuple = ()
    _losses: dict[str, Any] = field(default_factory=dict)
    _mtp_losses: dict[str, Any] = field(default_factory=dict)
    # buffers, what forwards made of them, and whether that is another value
    _buffers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Set back, behind it, what a program would find; keep what forwards have made of it."""
        states = self._before = random_states()
        before = [(b, b.detach().clone()) for m in self.models for _, b in m.named_buffers()]
        losses, mtp_losses = compat.logged_losses(), compat.logged_mtp_losses()
        try:
            with emptied(losses), emptied(mtp_losses):
                yield
                self._random = random_states()
                self._losses, self._mtp_losses = dict(losses), dict(mtp_losses)
        finally:
            set_random_states(*states)
            # which were written is known on the device alone: the host would wait for it
            self._buffers = [(b, b.detach().clone(), (b != value).any()) for b, value in before]
            self._write(before)

    @torch.no_grad()
    def _write(self, values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with unseen_by_autograd(tuple(buffer for buffer, _ in values)):
            for buffer, value in values:
                buffer.copy_(value)

    def drawn_since(self) -> bool:
        """Return True if the program has used random states that forwards have used before it."""
        if same_states(self._random, self._before):
            return False
        return not same_states(random_states(), self._before)

    def commit(self) -> None:
        """Make all as if they had just run: their iteration begins.

        What is shown has been cleared since: nothing is rounded by a sum.
        """
        if not same_states(self._random, self._before):
            set_random_states(*self._random)
        self._write([(b, torch.where(new, value, b)) for b, value, new in self._buffers])
        show_losses(self._losses)
        mtp_losses = compat.logged_mtp_losses()
        for name, entry in self._mtp_losses.items():
            if isinstance(mtp_losses.get(name), torch.Tensor):
                mtp_losses[name].add_(entry)
            else:
                mtp_losses[name] = entry
