"""NVIDIA's loop for long: what each rank holds at its end is what it held soon after its start."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import psutil
import pytest
from nvidia import COMMON, needs_training, train

pytestmark = needs_training

NUM_RANKS = 4
MICROBATCHES = 6
FLAGS = ['--num-layers', 8, '--pipeline-model-parallel-size', NUM_RANKS, '--clip-grad', 100]
FLAGS += ['--global-batch-size', MICROBATCHES, '--pipeline-watchdog-timeout', 120]
FLAGS += ['--enable-optimizer-post-validation', '--pipeline-schedule']
WARM_UP = 0.1  # of all iterations: until `auto` runs what it has planned, and steps are early
FLAT = 1.02  # times the memory after the warm-up, at most


@dataclass(frozen=True)
class Held:
    """What a rank holds after an iteration.

    Attributes:
        iteration: from 1.
        memory: in megabytes, without what files and other processes share.
        threads: how many.
        descriptors: how many.
    """

    iteration: int
    memory: float
    threads: int
    descriptors: int


@contextmanager
def weighed(training):
    """What the rank holds, a hundred times in the run."""
    from unittest import mock

    from megatron.training import get_args

    original, process, found = training.training_log, psutil.Process(os.getpid()), []

    def training_log(loss_dict, total, lr, iteration, *rest, **named):
        if iteration % max(1, get_args().train_iters // 100) == 0:
            memory = process.memory_info()
            own = (memory.rss - memory.shared) / 2**20
            found.append(Held(iteration, own, process.num_threads(), process.num_fds()))
        return original(loss_dict, total, lr, iteration, *rest, **named)

    with mock.patch.object(training, 'training_log', training_log):
        yield found


@pytest.mark.parametrize('iterations', [100, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize('schedule', ['zb-v', 'auto'])
def test_soak(ranks, schedule, iterations):
    argv = [*COMMON, *FLAGS, schedule, '--train-iters', iterations]
    trained = ranks(NUM_RANKS).run(train, list(map(str, argv)), weighed, timeout=3000)
    for rank, (*_, found) in enumerate(trained):
        after = [held for held in found if held.iteration > WARM_UP * iterations]
        first, last = after[: len(after) // 5], after[-len(after) // 5 :]
        before, now = (median(held.memory for held in part) for part in (first, last))
        print(
            f'rank {rank}: {before:.1f} to {now:.1f} MB ({now / before - 1:+.2%}), '
            f'all {min(h.memory for h in after):.1f} to {max(h.memory for h in after):.1f}, '
            f'threads {sorted({held.threads for held in after})}, '
            f'descriptors {sorted({held.descriptors for held in after})}'
        )
