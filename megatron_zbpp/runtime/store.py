"""The weight-gradient store: what W passes will compute, kept from B until W.

A layer whose weight gradient can wait hands the store its parameters and a function that computes
their gradients. The W pass runs those functions inside autograd, as the backward of a node whose
inputs are the parameters: so a gradient reaches its parameter by the same way, with the same hooks,
the same roundings and the same in-place accumulation as in a fused backward. Whoever listens for
gradients (DistributedDataParallel, a user's hook) sees an ordinary gradient, later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Key = tuple[int, int]  # (stage, microbatch)
Gradients = Sequence[torch.Tensor | None]


class WeightGradStore:
    """Deferred weight gradients by (stage, microbatch).

    `scope(key)` says which pass is running: layers ask `deferring` in forward, and `defer` in
    backward. Under `scope(None)` nothing is deferred. Autograd runs CUDA backwards on threads of
    its own, which see these attributes; a context variable they would not.
    """

    def __init__(self) -> None:
        self._key: Key | None = None
        # each record: the function, then its parameters
        self._pending: dict[Key, list[tuple[Callable | torch.nn.Parameter, ...]]] = {}

    @property
    def deferring(self) -> bool:
        """Whether the pass that runs now leaves its weight gradients to a W pass."""
        return self._key is not None

    @property
    def pending(self) -> int:
        """How many (stage, microbatch) wait between their B and their W."""
        return len(self._pending)

    def scope(self, key: Key | None) -> WeightGradStore:
        """Everything run inside belongs to `key`; `None`: compute weight gradients at once."""
        self._key = key
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._key = None

    def open(self, key: Key) -> None:
        """B of `key` begins: from here to `run(key)` it counts as pending."""
        self._pending[key] = []

    def defer(
        self, parameters: Sequence[torch.nn.Parameter], compute: Callable[[], Gradients]
    ) -> None:
        """Called by a layer's backward: `compute()` gives one gradient for each of `parameters`."""
        self._pending[self._key].append((compute, *parameters))

    def run(self, key: Key) -> None:
        """The W pass of `key`: computes its gradients and lets autograd accumulate them.

        Layers are visited in the order of a fused backward, last first; a parameter that was used
        twice gets the sum of both gradients in one accumulation, as there. Each record is freed as
        soon as its gradient is computed.
        """
        records = self._pending.pop(key)
        # The engine runs the youngest node first: create them in forward order.
        roots = tuple(_WeightGradient.apply(*records.pop()) for _ in range(len(records)))
        if roots:
            # as `torch.autograd.backward` does once it has made a gradient of each: nobody reads it
            torch.autograd.Variable._execution_engine.run_backward(
                roots, roots, False, False, (), True, accumulate_grad=True
            )

    def clear(self) -> None:
        """Forgets everything: after an error, so that no activation outlives its iteration."""
        self._key = None
        self._pending.clear()


class _WeightGradient(torch.autograd.Function):
    """A node over parameters whose backward is the deferred computation."""

    @staticmethod
    def forward(ctx, compute: Callable, *parameters: torch.nn.Parameter) -> torch.Tensor:
        ctx.compute = compute
        return torch.empty((), device=parameters[0].device)  # nobody reads it

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        compute, ctx.compute = ctx.compute, None  # freed when it has run
        with torch.no_grad():
            return None, *compute()
