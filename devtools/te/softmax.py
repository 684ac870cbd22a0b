"""Scaled softmax with its masks."""

from __future__ import annotations

import torch

from devtools.te.extension import kernel, registered


@kernel
def scaled_softmax_forward(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() * scale).softmax(-1).to(x.dtype)


@kernel
def scaled_masked_softmax_forward(
    x: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    return (x.float() * scale).masked_fill(mask.bool(), -10000.0).softmax(-1).to(x.dtype)


@kernel
def scaled_aligned_causal_masked_softmax_forward(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Aligned at the bottom right: the last query sees all keys."""
    queries, keys = x.shape[-2:]
    mask = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    return (x.float() * scale).masked_fill(mask, float('-inf')).softmax(-1).to(x.dtype)


registered(
    'scaled_upper_triang_masked_softmax_forward', scaled_aligned_causal_masked_softmax_forward
)


def _backward(grad: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the gradient of what was scaled; y: what the forward gave."""
    g, p = grad.float(), y.float()
    return (scale * p * (g - (g * p).sum(-1, keepdim=True))).to(y.dtype)


for _kind in ('', '_upper_triang_masked', '_aligned_causal_masked', '_masked'):
    registered(f'scaled{_kind}_softmax_backward', _backward)
