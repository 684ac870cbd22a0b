"""The example, in which one rank meets with a mishap in the middle of an iteration.

torchrun ... doomed.py RANK ITERATION PLACE COUNT [flags of the example]

The rank is killed at which `forward` step of the iteration, or at which `storage` that leaves or
comes back: of a transfer of several, those before are under way then. At other places it cuts the
link of its host; COUNT is then a file that takes the time of that, by the clock of all hosts.
"""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pretrain_gpt
import torch.distributed as dist

from megatron_zbpp.mcore.optimizer import split_step
from megatron_zbpp.mcore.patches import training_loop
from megatron_zbpp.runtime.activations import copies


def main() -> None:
    rank, iteration, place, count = sys.argv[1:5]
    del sys.argv[1:5]
    iterations = calls = 0

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def cut() -> None:
        subprocess.run(['ip', 'link', 'set', 'eth0', 'down'], check=True)
        Path(count).write_text(str(time.time()))

    def unlucky(original: Callable, at: int, mishap: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args, **kwargs):
            nonlocal calls
            there = dist.get_rank() == int(rank) and iterations == int(iteration)
            calls += there
            if there and calls == at:
                time.sleep(3)  # by now the other ranks have come as far as they can
                mishap()
            return original(*args, **kwargs)

        return call

    def counting(*args, **kwargs):
        nonlocal iterations
        iterations += 1
        return run_batch(*args, **kwargs)

    run_batch, pretrain_gpt.run_batch = pretrain_gpt.run_batch, counting
    name, *owners = {
        'forward': ('forward_step', pretrain_gpt),
        'storage': ('bytes_of', copies),
        'pass': ('forward_step', pretrain_gpt),
        'step': ('step', *training_loop.STEPPING),
        'validated step': ('begin', split_step.SplitStep),
        'checkpoint': ('save', pretrain_gpt.checkpoints.dist_checkpointing),
    }[place]
    at, mishap = (int(count), kill) if count.isdigit() else (6 if place == 'pass' else 1, cut)
    for owner in owners:
        setattr(owner, name, unlucky(getattr(owner, name), at, mishap))
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
