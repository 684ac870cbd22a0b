"""The example, in which one rank is killed in the middle of an iteration.

torchrun ... doomed.py RANK ITERATION WHAT COUNT [flags of the example]

Killed at which `forward` step of the iteration, or at which `storage` that leaves or comes back: of
a transfer of several, those before are under way then.
"""

import os
import signal
import sys
import time

import pretrain_gpt
import torch.distributed as dist

from megatron_zbpp.runtime.activations import copies


def main() -> None:
    rank, iteration, what, count = sys.argv[1:5]
    del sys.argv[1:5]
    forward_step, run_batch = pretrain_gpt.forward_step, pretrain_gpt.run_batch
    bytes_of = copies.bytes_of
    done = {'iterations': 0, 'forward': 0, 'storage': 0}

    def counting_run_batch(*args, **kwargs):
        done.update(iterations=done['iterations'] + 1, forward=0, storage=0)
        return run_batch(*args, **kwargs)

    def die_at(kind: str) -> None:
        done[kind] += 1
        there = dist.get_rank() == int(rank) and done['iterations'] == int(iteration)
        if there and kind == what and done[kind] == int(count):
            time.sleep(3)  # by now the other ranks have come as far as they can
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly_forward_step(*args, **kwargs):
        die_at('forward')
        return forward_step(*args, **kwargs)

    def deadly_bytes_of(*args):
        die_at('storage')
        return bytes_of(*args)

    pretrain_gpt.forward_step = deadly_forward_step
    pretrain_gpt.run_batch = counting_run_batch
    copies.bytes_of = copies.bytes_of = deadly_bytes_of
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
