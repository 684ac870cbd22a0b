"""The example on two hosts, whose link is cut by one rank at a certain place of an iteration.

torchrun ... cut_off.py RANK ITERATION PLACE FILE [flags of the example]

FILE takes the time of the cut, by the clock of all hosts.
"""

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pretrain_gpt
import torch.distributed as dist

from megatron_zbpp.mcore.optimizer import split_step, stepping


def main() -> None:
    rank, iteration, place, file = sys.argv[1:5]
    del sys.argv[1:5]
    iterations = 0

    def cutting(original: Callable, at: int = 1) -> Callable:
        calls = 0

        @functools.wraps(original)
        def cut_before(*args, **kwargs):
            nonlocal calls
            there = dist.get_rank() == int(rank) and iterations == int(iteration)
            calls += there
            if there and calls == at:
                time.sleep(3)  # by now the other ranks have come as far as they can
                subprocess.run(['ip', 'link', 'set', 'eth0', 'down'], check=True)
                Path(file).write_text(str(time.time()))
            return original(*args, **kwargs)

        return cut_before

    def counting(*args, **kwargs):
        nonlocal iterations
        iterations += 1
        return run_batch(*args, **kwargs)

    run_batch, pretrain_gpt.run_batch = pretrain_gpt.run_batch, counting
    if place == 'pass':
        pretrain_gpt.forward_step = cutting(pretrain_gpt.forward_step, at=6)
    elif place == 'step':
        for optimizer in stepping.STEPPING:
            optimizer.step = cutting(optimizer.step)
    elif place == 'validated step':
        split_step.SplitStep.begin = cutting(split_step.SplitStep.begin)
    else:
        saving = pretrain_gpt.checkpoints.dist_checkpointing
        saving.save = cutting(saving.save)
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
