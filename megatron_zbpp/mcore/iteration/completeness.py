"""After the first iteration of training: every weight that took part has its gradient.

A layer that puts off its weight gradient in a way that we do not know would train on nothing, and
nobody would see it in the loss for long.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from weakref import WeakSet

import torch
import torch.distributed as dist

from megatron_zbpp.mcore.patches import transformer_engine
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.weight_grads import WeightGradStore

_UNUSED = (
    'rank %d: no layer left its weight gradient to a W pass, so that W passes have '
    'nothing to do: results are right, and the schedule gains nothing by them. Layers that can are '
    "Megatron's ColumnParallelLinear and RowParallelLinear, and Transformer Engine's: report it "
    'if these are'
)
_complete: WeakSet[torch.nn.Module] = WeakSet()  # chunks that have been looked at


def every_weight_gradient(
    models: Sequence[torch.nn.Module], store: WeightGradStore
) -> AbstractContextManager[None]:
    """Enter an iteration of training, which is looked at if it is the first of these chunks.

    A weight that autograd did not visit took no part in it: an expert without tokens, a layer that
    is not used. One that it visited got a gradient: as such, or added to `main_grad`. Where W
    passes had nothing to compute, that is said: gradients are right, but nothing is gained.

    Raises:
        RuntimeError: afterwards; names the parameters that got none.
    """
    fresh = [model for model in models if model not in _complete]
    return _looking(fresh, store) if fresh else contextlib.nullcontext()


@contextlib.contextmanager
def _looking(models: Sequence[torch.nn.Module], store: WeightGradStore) -> Iterator[None]:
    visits: dict[str, bool] = {}  # by name, whether autograd brought a gradient
    parameters = {
        name if len(models) == 1 else f'chunk {k}: {name}': parameter
        for k, model in enumerate(models)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }

    def visit(name: str, gradient: torch.Tensor | None) -> None:
        visits[name] = visits.get(name, False) or gradient is not None

    handles = [
        parameter.register_hook(functools.partial(visit, name))
        for name, parameter in parameters.items()
    ]
    try:
        with transformer_engine.strays() as strays:
            yield
    finally:
        for handle in handles:
            handle.remove()
    waiting = {
        id(parameter) for model in models for parameter in transformer_engine.left_over(model)
    }
    missing = [
        name
        for name, parameter in parameters.items()
        if id(parameter) in waiting or not (visits.get(name, True) or _has_main_grad(parameter))
    ]
    if missing or strays:
        raise RuntimeError(_message(missing, strays))
    _complete.update(models)
    if not store.used and any(p.ndim > 1 and 'embedding' not in n for n, p in parameters.items()):
        rank_log.warning(_UNUSED, dist.get_rank())


def _has_main_grad(parameter: torch.nn.Parameter) -> bool:
    """Return whether a layer has added to `main_grad`, if that can be told: it may have no flag."""
    return getattr(parameter, 'grad_added_to_main_grad', hasattr(parameter, 'main_grad'))


def _message(missing: Sequence[str], strays: Sequence[tuple[torch.Size, ...]]) -> str:
    said = 'weight gradients were put off in the first iteration, and no W pass computed them: '
    if missing:
        said += ', '.join(missing)
    else:
        shapes = ', '.join(
            ' and '.join(str(tuple(s)) for s in each) for each in dict.fromkeys(strays)
        )
        said += f"Transformer Engine's, of layers that model.modules() does not find, from {shapes}"
    return said + (
        ". Use layers that the schedule can split (without Transformer Engine's op fuser), or a "
        'schedule without W passes such as 1f1b; please report it'
    )
