"""Dummy gradients: what autograd is given for a gradient that is in `main_grad` already."""

from __future__ import annotations

import sys
from typing import Any

import torch

ADDED = 'grad_added_to_main_grad'  # a flag that DistributedDataParallel puts on parameters
_TE = 'transformer_engine.pytorch.module.base'  # has a buffer for each shape, as Megatron uses it


def dummy_gradient(parameter: Any) -> torch.Tensor | None:
    """Return a defined gradient for `parameter`, whose real one a kernel has added to `main_grad`.

    DistributedDataParallel starts the reduction of a bucket in a hook on the parameter's
    AccumulateGrad, which runs on the stream where that node was made. Autograd orders that stream
    behind the computation of a *defined* gradient only, so None would let the reduction start
    before `main_grad` is complete. Megatron and Transformer Engine return dummies for that reason.

    Returns:
        A tensor of the parameter's shape and dtype, its values unused (zeros if Megatron has set
        `zero_out_wgrad`, for it then adds them); None without DistributedDataParallel, which would
        take it for a gradient.
    """
    if not hasattr(parameter, ADDED):
        return None
    setattr(parameter, ADDED, True)
    zero = getattr(parameter, 'zero_out_wgrad', False)
    shape, dtype = parameter.main_grad.shape, parameter.dtype
    base = sys.modules.get(_TE)
    if base is not None and len(shape) == 2:  # it takes matrices only
        return base.get_dummy_wgrad(list(shape), dtype, zero=zero)
    make = torch.zeros if zero else torch.empty
    return make(shape, dtype=dtype, device=parameter.main_grad.device)


def dropped_gradient(parameter: Any, fused: bool) -> torch.Tensor | None:
    """Return a defined gradient for `parameter`, whose weight gradient is left out.

    Args:
        parameter: a weight or a bias.
        fused: whether its gradients are added to `main_grad` by kernels; otherwise
            DistributedDataParallel adds what it gets, here zeros.
    """
    if fused:
        return dummy_gradient(parameter)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
