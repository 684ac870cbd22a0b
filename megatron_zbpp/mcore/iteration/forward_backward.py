"""The forward_backward function that stands in Megatron's table while the plugin is enabled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.iteration.batch import NextIteration
from megatron_zbpp.mcore.iteration.preparation import prepare
from megatron_zbpp.mcore.patches import transformer_engine
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session

_MODULE = 'megatron.core.pipeline_parallel.schedules'
_PIPELINED = (
    'forward_backward_pipelining_with_interleaving',
    'forward_backward_pipelining_without_interleaving',
)


def patches(session: Session, next_iteration: NextIteration) -> Iterator[Patch]:
    """Yield Megatron's two pipelined functions."""

    def ours(original: Callable) -> Callable:
        function = functools.partial(forward_backward, session, next_iteration, original)
        return functools.update_wrapper(function, original)

    for name in _PIPELINED:
        yield Patch(_MODULE, name, ours, (f'{_MODULE}:get_forward_backward_func',))


def forward_backward(
    session: Session, next_iteration: NextIteration, original: Callable, **arguments: Any
) -> list[Any]:
    """Run one global batch by the session's schedule; arguments and result are Megatron's.

    Several modules in one pipeline, which have process groups each, go to `original`.
    """
    pg_collection = arguments.get('pg_collection')
    if pg_collection is not None and not isinstance(pg_collection, ProcessGroupCollection):
        _refuse_delayed(arguments.get('model'))
        return original(**arguments)
    call = Arguments(**arguments)
    batch = next_iteration.take(call) or prepare(session, next_iteration, call)[0]
    with batch.timed():
        batch.run(session)
        if not next_iteration.stands():
            batch = prepare(session, next_iteration, call)[0]
            batch.run(session)
    return batch.finish(session)


def _refuse_delayed(model: torch.nn.Module | list[torch.nn.Module] | None) -> None:
    """Raise for modules whose weight gradients only our W passes would compute."""
    for module in model if isinstance(model, list) else [model]:
        if module is not None and transformer_engine.delaying_modules(module):
            raise NotImplementedError(
                "several modules in one pipeline run by Megatron's own schedule, which would lose "
                'the weight gradients that Transformer Engine delays for ours: call '
                'megatron_zbpp.enable() for models of one module only'
            )
