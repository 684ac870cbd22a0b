"""Ranks that share a GPU: over gloo, with their messages copied to the host and back.

NCCL refuses two ranks on one GPU. Our own `Channels` copies by itself; this is for Megatron's
schedules, the reference.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class Copied:
    """A send or receive by way of the host."""

    def __init__(self, work: dist.Work, host: torch.Tensor, target: torch.Tensor | None) -> None:
        self._work, self._host, self._target = work, host, target

    def is_completed(self) -> bool:
        return self._target is None and self._work.is_completed()

    def wait(self, *args: Any) -> bool:
        done = self._work.wait(*args)
        if self._target is not None:
            self._target.copy_(self._host)
            self._target = None
        return done


def join_gpu(rank: int) -> None:
    """This process's rank gets a GPU, shared where there are fewer, and talks by gloo."""
    local = rank % torch.cuda.device_count()
    os.environ |= {
        'LOCAL_RANK': str(local),
        'CUDA_DEVICE_MAX_CONNECTIONS': '1',  # wanted with tensor parallelism
        # tests compare bits
        'CUBLAS_WORKSPACE_CONFIG': ':4096:8',
        'NVTE_ALLOW_NONDETERMINISTIC_ALGO': '0',
    }
    torch.cuda.set_device(local)
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.isend = distributed_c10d.isend = _isend
    dist.irecv = distributed_c10d.irecv = _irecv


def _over_gloo(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    return tensor.device.type == 'cuda' and dist.get_backend(group) == 'gloo'


def _isend(
    tensor, dst=None, group=None, tag=0, group_dst=None, _original=distributed_c10d.isend
) -> Any:
    if not _over_gloo(tensor, group):
        return _original(tensor, dst, group, tag, group_dst)
    host = tensor.detach().to('cpu')
    return Copied(_original(host, dst, group, tag, group_dst), host, None)


def _irecv(
    tensor, src=None, group=None, tag=0, group_src=None, _original=distributed_c10d.irecv
) -> Any:
    if not _over_gloo(tensor, group):
        return _original(tensor, src, group, tag, group_src)
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    return Copied(_original(host, src, group, tag, group_src), host, tensor.detach())
