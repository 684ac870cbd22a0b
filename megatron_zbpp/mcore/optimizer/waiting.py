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
from megatron_zbpp.mcore.refusals_of_techniques import READ_BY_LOOP

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
_INTO_GRADIENTS = 'overlap_param_gather: forwards gather layers into the memory of gradients'
BOTH_WAYS = 'microbatches go both ways, so that no rank is the first'
# What a precision-aware optimizer keeps in other types, and those that have no scales.
_STATES = ('main_params_dtype', 'exp_avg_dtype', 'exp_avg_sq_dtype')
_UNSCALED = (torch.float32, torch.bfloat16)


def refusal(optimizer: MegatronOptimizer) -> str | None:
    """Return why steps of this optimizer must wait for all ranks; None: they need not."""
    for each in members(optimizer):
        if compat.gathers_into_gradients(each):
            return _INTO_GRADIENTS
        known = type(each) in _OUTERMOST or compat.shares_out_layers(each)
        if not known:  # what it does around its leaves' steps is its own
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


def _unknown(optimizer: MegatronOptimizer, known: tuple[type, ...]) -> str:
    names = ', '.join(each.__name__ for each in known)
    return f'{type(optimizer).__name__} is not one of {names}, and not supported so far'


def refusal_of_loop() -> str | None:
    """Return why steps in this training loop must wait for all ranks; None: they need not."""
    args = compat.training_arguments()
    read = next((name for name in READ_BY_LOOP if getattr(args, name, None)), None)
    if read is not None:
        return f'{read}: it takes all forwards of an iteration to run when Megatron asks for them'
    mode = compat.rerun_mode()
    if mode is None:
        return None
    return (
        f'rerun_mode={mode}: an iteration runs again from where its data and random states were '
        'noted, and forwards would have begun before that; give --rerun-mode disabled'
    )


def refusal_of_model(config: Any) -> str | None:
    """Return why forwards of a model with this config cannot be dropped; None: they can."""
    if getattr(config, 'fp8', None) and getattr(config, 'fp8_recipe', None) == 'delayed':
        return 'fp8_recipe=delayed: forwards that are dropped would leave their scales'
    return None


def leaves(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, and of chains in it; of one that is none, itself."""
    return [each for each in members(optimizer) if not _parts(each)]


def members(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizer, and all that it is a chain of."""
    return [optimizer, *(each for part in _parts(optimizer) for each in members(part))]


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, 'chained_optimizers', [])
