"""State that an iteration begins with, kept so that it can begin again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.side_effects import random_states, set_random_states
from megatron_zbpp.post_validation.watch import any_bits

_Copies = list[tuple[torch.Tensor, torch.Tensor]]  # tensors, and what they were


@dataclass(frozen=True)
class EntryState:
    """Random states, buffers, logged losses and gradients of one rank.

    Attributes:
        models: the chunks of this rank.
        random: states of random generators.
        prefilled: whether gradients are other than zero; False where nobody looked.
    """

    models: list[torch.nn.Module]
    random: tuple
    prefilled: bool
    _tensors: _Copies
    _entries: list[tuple[dict[str, Any], dict[str, Any]]]
    _grads: list[tuple[torch.nn.Parameter, torch.Tensor | None]]
    _gradients: _Copies

    @classmethod
    def of(cls, models: list[torch.nn.Module], look: bool) -> EntryState:
        """Return that of now.

        Args:
            models: the chunks of this rank.
            look: whether gradients may be other than zero, and are looked at.
        """
        losses, mtp_losses = compat.logged_losses(), compat.logged_mtp_losses()
        tensors = [buffer for model in models for _, buffer in model.named_buffers()]
        tensors += map(compat.logged_values, losses.values())
        tensors += (value for value in mtp_losses.values() if isinstance(value, torch.Tensor))
        grads = [(p, p.grad) for model in models for p in model.parameters()]
        gradients = [gradient for model in models for gradient in compat.gradient_buffers(model)]
        gradients += (grad for _, grad in grads if grad is not None)
        prefilled = look and any_bits(gradients)
        return cls(
            models,
            random_states(),
            prefilled,
            _copies(tensors),
            [(entries, dict(entries)) for entries in (losses, mtp_losses)],
            grads,
            _copies(gradients) if prefilled else [],
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Make all as it was; gradients that nobody looked at are zero."""
        set_random_states(*self.random)
        for entries, before in self._entries:
            entries.clear()
            entries.update(before)
        for model in self.models:
            compat.forget_gradients(model)
        for parameter, grad in self._grads:
            parameter.grad = None if grad is None else grad.zero_()
        for tensor, value in [*self._tensors, *self._gradients]:
            tensor.copy_(value)


def _copies(tensors: list[torch.Tensor]) -> _Copies:
    return [(tensor, tensor.detach().clone()) for tensor in tensors]
