"""Iterations that NVIDIA's loop leaves out: `--iterations-to-skip`, and those of a tracker file.

Megatron's own function reads their batches from one iterator, and takes each rank to have one. A
rank with several chunks has a list of them, and a stage in the middle has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_zbpp.mcore.iteration.batch import NextIteration
from megatron_zbpp.mcore.patches.registry import Patch

_TRAINING = 'megatron.training.training'


def patches(next_iteration: NextIteration) -> Iterator[Patch]:
    """Yield the function that reads the batches of an iteration that is left out."""
    ours, users = functools.partial(_of_all_chunks, next_iteration), (f'{_TRAINING}:train',)
    yield Patch(_TRAINING, 'dummy_train_step', ours, users, late=True)


def _of_all_chunks(next_iteration: NextIteration, original: Callable) -> Callable:
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
