"""NVIDIA's loop for long: what each rank holds at its end is what it held soon after its start."""

from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import psutil
import pytest
from events import before
from grids import some
from nvidia import COMMON, needs_training, train

from megatron_zbpp.mcore import enabled

pytestmark = [needs_training, pytest.mark.one_release]

NUM_RANKS = 4
MICROBATCHES = 6
FLAGS = ['--num-layers', 8, '--pipeline-model-parallel-size', NUM_RANKS, '--clip-grad', 100]
FLAGS += ['--global-batch-size', MICROBATCHES, '--pipeline-watchdog-timeout', 120]
FLAGS += ['--enable-optimizer-post-validation', '--pipeline-schedule']
WARM_UP = 0.3  # of all iterations: until `auto` runs what it has planned, and steps are early
FLAT = 1.02  # times the memory after the warm-up, at most


@dataclass(frozen=True)
class Held:
    """What a rank holds after an iteration."""

    iteration: int  # from 1
    memory: float  # in megabytes, without what files and other processes share
    threads: int
    descriptors: int
    early: int  # steps so far that did not wait


@contextmanager
def weighed(training):
    """What the rank holds, a hundred times in the run."""
    from megatron.training import get_args

    process, found = psutil.Process(), []

    def weigh(loss_dict, total, lr, iteration, *_, **__):
        if iteration % max(1, get_args().train_iters // 100) == 0:
            memory, early = process.memory_info(), enabled.plugin.post_validation.early
            own = (memory.rss - memory.shared) / 2**20
            found.append(Held(iteration, own, process.num_threads(), process.num_fds(), early))

    with before((training, 'training_log', weigh)):
        yield found


@pytest.mark.timeout(3600)
@some('schedule, iterations', [('zb-v', 60)], ('zb-v', 2000), ('auto', 2000))
def test_nothing_grows(ranks, schedule, iterations):
    argv = [*COMMON, *FLAGS, schedule, '--train-iters', iterations]
    trained = ranks(NUM_RANKS).run(train, list(map(str, argv)), weighed, timeout=3000)
    for rank, (*_, found) in enumerate(trained):
        after = [held for held in found if held.iteration > WARM_UP * iterations]
        parts = after[: len(after) // 5], after[-len(after) // 5 :]
        first, last = (median(held.memory for held in part) for part in parts)
        threads, descriptors = {h.threads for h in after}, {h.descriptors for h in after}
        print(
            f'rank {rank}: {first:.1f} to {last:.1f} MB ({last / first - 1:+.2%}), '
            f'{threads} threads, {descriptors} descriptors, {after[-1].early} early steps'
        )
        assert last < FLAT * first
        assert len(threads) == len(descriptors) == 1
    early = [found[-1].early for *_, found in trained]
    assert max(early) > iterations / 2, 'the last rank that hears of the others has no use for them'
