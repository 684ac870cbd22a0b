"""Ranks that share a GPU, over NCCL: each says that it is a host of its own.

Not gloo: it cannot sum several CUDA tensors in one call, which Megatron's DistributedDataParallel
asks of it ("allreduce_coalesced: unsupported device type cuda").
"""

import os

import torch

from benchmarks.one_gpu.ranks import shared_environment


def join_gpu(rank: int) -> None:
    """Give this process's rank a GPU, shared where there are fewer."""
    local = rank % torch.cuda.device_count()
    os.environ |= {
        **shared_environment(rank),
        'RANKS_BACKEND': 'cpu:gloo,cuda:nccl',
        'LOCAL_RANK': str(local),
        'CUDA_DEVICE_MAX_CONNECTIONS': '1',  # wanted with tensor parallelism
        'NVTE_ALLOW_NONDETERMINISTIC_ALGO': '0',  # tests compare bits
    }
    torch.cuda.set_device(local)
    torch.use_deterministic_algorithms(True, warn_only=True)
