"""Which optimizers' steps must wait for all ranks, and why."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from megatron_zbpp.mcore import compat

_KNOWN = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
_OUTERMOST = (*_KNOWN, ChainedOptimizer)
_REFUSED = {
    'optimizer_cpu_offload': 'the host steps in its own time',
    'optimizer_cuda_graph': 'a captured step steps what it was captured with',
    'overlap_param_gather_with_optimizer_step': 'parameters are gathered amid the step',
    'reuse_grad_buf_for_mxfp8_param_ag': 'parameters and gradients share a buffer',
}
_REFUSED_OF_DDP = {
    'use_megatron_fsdp': 'parameters are gathered amid the step',
    'fp8_param_gather': 'weights are quantized anew amid the step',
}
# What a precision-aware optimizer keeps in other types, and those that have no scales.
_STATES = ('main_params_dtype', 'exp_avg_dtype', 'exp_avg_sq_dtype')
_UNSCALED = (torch.float32, torch.bfloat16)


def refusal(optimizer: MegatronOptimizer) -> str | None:
    """Why steps of this optimizer must wait for all ranks; None: they need not."""
    for each in (optimizer, *parts_of(optimizer)):
        if compat.shares_out_layers(each):
            why = _refusal_of_shares(each)
            if why is not None:
                return why
        elif type(each) not in _OUTERMOST:  # what it does around its leaves' steps is its own
            return _unknown(each, _OUTERMOST)
    for leaf in leaves(optimizer):
        if type(leaf) not in _KNOWN:
            return _unknown(leaf, _KNOWN)
        if getattr(leaf, 'is_stub_optimizer', False):
            return 'a rank has no parameters to step'
        for name, why in _REFUSED.items():
            if getattr(leaf.config, name, False):
                return f'{name}: {why}'
        for name in _STATES if getattr(leaf.config, 'use_precision_aware_optimizer', False) else ():
            if getattr(leaf.config, name, torch.float32) not in _UNSCALED:
                return f'{name}: the optimizer keeps scales of that state to itself'
        for name, why in _REFUSED_OF_DDP.items():
            if getattr(getattr(leaf, 'ddp_config', None), name, False):
                return f'{name}: {why}'
    return None


def _refusal_of_shares(optimizer: Any) -> str | None:
    """Why parameters that ranks step some layers of each cannot be gathered again."""
    if compat.gathers_amid_forwards(optimizer):
        return 'overlap_param_gather: forwards gather the layers of such an optimizer'
    if compat.gathers_buffers(optimizer):
        return 'use_layer_wise_param_layout: nobody has tried it with this schedule'
    return None


def _unknown(optimizer: MegatronOptimizer, known: tuple[type, ...]) -> str:
    names = ', '.join(each.__name__ for each in known)
    return f'{type(optimizer).__name__} is not one of {names}, and not supported so far'


def refusal_of_model(config: Any) -> str | None:
    """Why forwards of a model with this config cannot be dropped; None: they can."""
    if getattr(config, 'fp8', None) and getattr(config, 'fp8_recipe', None) == 'delayed':
        return 'fp8_recipe=delayed: forwards that are dropped would leave their scales'
    return None


def leaves(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, and of chains in it; of one that is none, itself."""
    found = parts_of(optimizer)
    return [leaf for part in found for leaf in leaves(part)] if found else [optimizer]


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return list(getattr(optimizer, 'chained_optimizers', []))
