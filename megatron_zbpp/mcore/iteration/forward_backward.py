"""Functions that run an iteration, or leave one out, in place of Megatron's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.iteration.batch import NextIteration
from megatron_zbpp.mcore.iteration.preparation import prepare
from megatron_zbpp.mcore.layers import transformer_engine
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session

_MODULE = 'megatron.core.pipeline_parallel.schedules'
_PIPELINED = (
    'forward_backward_pipelining_with_interleaving',
    'forward_backward_pipelining_without_interleaving',
)
_TRAINING = 'megatron.training.training'


def patches(session: Session, next_iteration: NextIteration) -> Iterator[Patch]:
    """Yield Megatron's two pipelined functions, and the one for iterations that are left out."""

    def ours(original: Callable) -> Callable:
        function = functools.partial(forward_backward, session, next_iteration, original)
        return functools.update_wrapper(function, original)

    for name in _PIPELINED:
        yield Patch(_MODULE, name, ours, (f'{_MODULE}:get_forward_backward_func',))
    skipping = functools.partial(_of_all_chunks, next_iteration)
    yield Patch(_TRAINING, 'dummy_train_step', skipping, (f'{_TRAINING}:train',), late=True)


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


def _of_all_chunks(next_iteration: NextIteration, original: Callable) -> Callable:
    """Read the batches of an iteration that is left out, for a rank with any number of chunks.

    Megatron's own reads one iterator (`--iterations-to-skip`, and iterations of a tracker file). A
    rank with several chunks has a list of them, and a stage in the middle has none.
    """

    @functools.wraps(original)
    def dummy_train_step(data_iterator: Any) -> None:
        next_iteration.settle(clean=False)
        given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        iterators = list(filter(None, map(next_iteration.replayed, given)))
        while get_rerun_state_machine().should_run_forward_backward(data_iterator):
            for _ in range(get_num_microbatches()):
                for iterator in iterators:
                    next(iterator)

    return dummy_train_step
