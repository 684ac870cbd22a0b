"""A stage that sleeps, and saves as many bytes as it is told to."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from megatron_zbpp.ir import Pass
from megatron_zbpp.runtime.weight_grads import WeightGradStore


class Sizes(NamedTuple):
    """Of a stage.

    Attributes:
        seconds: that F, B and W take, each.
        nbytes: that F saves.
    """

    seconds: float
    nbytes: int


class _Work(torch.autograd.Function):
    """Sleeps in F, B and W; y = x w."""

    @staticmethod
    def forward(
        ctx: Any, store: WeightGradStore, sizes: Sizes, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        time.sleep(sizes.seconds)
        ctx.store, ctx.sizes, ctx.weight, ctx.defers = store, sizes, weight, store.deferring
        saved = torch.empty(sizes.nbytes // 4).fill_(float(x.detach().sum()))  # fills its pages
        ctx.save_for_backward(saved, weight.detach())
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        saved, weight = ctx.saved_tensors
        (gradient,), sizes = gradients, ctx.sizes
        time.sleep(sizes.seconds)
        value = gradient.sum() * saved[0]

        def weights() -> list[torch.Tensor]:
            time.sleep(sizes.seconds)
            return [value.reshape(1)]

        if not ctx.defers:
            return None, None, gradient * weight, weights()[0]
        ctx.store.defer([ctx.weight], weights)
        return None, None, gradient * weight, None


class SleepingStage(torch.nn.Module):
    """One number is its weight.

    Args:
        store: of the weight gradients.
        sizes: what it takes.
        place: 'first', 'last', or elsewhere.
    """

    def __init__(self, store: WeightGradStore, sizes: Sizes, place: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 1.25))
        self._store, self._sizes, self._place = store, sizes, place

    def forward(self, p: Pass, received: torch.Tensor | None) -> torch.Tensor:
        x = received
        if x is None:
            x = torch.full((4,), 1.0 + p.microbatch, requires_grad=torch.is_grad_enabled())
        y = _Work.apply(self._store, self._sizes, x, self.weight)
        assert isinstance(y, torch.Tensor)
        return y.sum() if self._place == 'last' else y

    def forward_without_graph(self, p: Pass, received: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            return self.forward(p, received)

    def recompute(self, p: Pass, received: torch.Tensor | None) -> torch.Tensor:
        return self.forward(p, received)

    def backward(
        self,
        p: Pass,
        received: torch.Tensor | None,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:
        torch.autograd.backward(output, gradient)
        return None if received is None else received.grad

    def release(self, output: torch.Tensor) -> None:
        pass

    def grad_sync(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()
