"""The example, in which one rank is killed in the middle of an iteration.

torchrun ... doomed.py RANK ITERATION FORWARDS [flags of the example]
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pretrain_gpt
import torch.distributed as dist


def main() -> None:
    rank, iteration, forwards = map(int, sys.argv[1:4])
    del sys.argv[1:4]
    forward_step, run_batch = pretrain_gpt.forward_step, pretrain_gpt.run_batch
    count = {'iterations': 0, 'forwards': 0}

    def counting_run_batch(*args, **kwargs):
        count['iterations'] += 1
        count['forwards'] = 0
        return run_batch(*args, **kwargs)

    def deadly_forward_step(*args, **kwargs):
        count['forwards'] += 1
        if (dist.get_rank(), *count.values()) == (rank, iteration, forwards):
            time.sleep(3)  # by now the other ranks have come as far as they can
            os.kill(os.getpid(), signal.SIGKILL)
        return forward_step(*args, **kwargs)

    pretrain_gpt.forward_step = deadly_forward_step
    pretrain_gpt.run_batch = counting_run_batch
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
