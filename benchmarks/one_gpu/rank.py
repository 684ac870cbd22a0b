"""One rank of the example's training, on a GPU that others share: see `nccl`.

    python benchmarks/one_gpu/rank.py ARGUMENT_OF_PRETRAIN_GPT ...

DELAYS=1 puts sleeps of random length on the device's stream before each W, so that what does not
wait for W comes too early. Ends with a line on memory.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples' / 'gpt')]

import torch

from megatron_zbpp.emulation import cpu
from megatron_zbpp.runtime.weight_grads import WeightGradStore

if importlib.util.find_spec(cpu.APEX) is None:
    cpu.install_apex()  # before Megatron looks for it: the same sum, by torch

import pretrain_gpt


def delay(seed: int) -> None:
    """Make the device sleep before each W, up to about 4 ms."""
    lengths, original = random.Random(seed), WeightGradStore.run

    def run(self, key):
        torch.cuda._sleep(lengths.randrange(6_000_000))
        return original(self, key)

    WeightGradStore.run = run


def main() -> None:
    """Train; say what the allocator did."""
    real = pretrain_gpt.DEVICE.type == 'cuda'
    torch.use_deterministic_algorithms(True, warn_only=True)
    if os.environ.get('DELAYS') == '1' and real:
        delay(int(os.environ['RANK']))
    pretrain_gpt.main()
    if real:
        found = torch.cuda.memory_stats()
        names = 'allocated_bytes.all.peak', 'reserved_bytes.all.peak', 'num_alloc_retries'
        print('memory:', ', '.join(f'{name} {found[name]}' for name in names), flush=True)


if __name__ == '__main__':
    main()
