"""Which optimizers' steps must wait for all ranks, and why."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.job import rules_table
from megatron_zbpp.mcore.job.rules import Context, Rule, check

_KNOWN = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
_OUTERMOST = (*_KNOWN, ChainedOptimizer)
_INTO_GRADIENTS = 'overlap_param_gather: forwards gather layers into the memory of gradients'
BOTH_WAYS = 'microbatches go both ways, so that no rank is the first'


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
        sources = leaf.config, getattr(leaf, 'ddp_config', None)
        if why := _waits(rules_table.WAITS_BY_OPTIMIZER, *sources):
            return why
    return None


def _waits(rules: Iterable[Rule], *sources: Any) -> str | None:
    return next(map(str, check(Context(sources), rules)), None)


def _unknown(optimizer: MegatronOptimizer, known: tuple[type, ...]) -> str:
    names = ', '.join(each.__name__ for each in known)
    return f'{type(optimizer).__name__} is not one of {names}, and not supported so far'


def refusal_of_loop() -> str | None:
    """Return why steps in this training loop must wait for all ranks; None: they need not."""
    mode = SimpleNamespace(rerun_mode=compat.rerun_mode())
    return _waits(rules_table.WAITS_BY_LOOP, mode, compat.training_arguments())


def refusal_of_model(config: Any) -> str | None:
    """Return why forwards of a model with this config cannot be dropped; None: they can."""
    return _waits(rules_table.WAITS_BY_MODEL, config)


def leaves(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, and of chains in it; of one that is none, itself."""
    return [each for each in members(optimizer) if not _parts(each)]


def members(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizer, and all that it is a chain of."""
    return [optimizer, *(each for part in _parts(optimizer) for each in members(part))]


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, 'chained_optimizers', [])
