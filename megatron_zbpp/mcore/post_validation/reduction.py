"""Numbers that all ranks of a group reduce, begun at one place and read at a later one.

Between the two the device is given passes. On CUDA the numbers are read on a stream of their own,
behind the reduction alone: the host does not wait until the device has run those passes, and has
more queued behind them by then.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_zbpp.mcore import compat


@dataclass(frozen=True)
class Reduction:
    """A number on its way over all ranks of `group`.

    Attributes:
        local: of this rank.
        value: all ranks' when `work` is done.
        copy: takes that on the host; page-locked before forwards run ahead, which may wait for
            the device.
    """

    local: float
    value: torch.Tensor
    group: dist.ProcessGroup
    work: dist.Work
    copy: torch.Tensor

    @classmethod
    def begin(
        cls, local: float, op: Any, group: dist.ProcessGroup, device: torch.device
    ) -> Reduction:
        dtype = torch.int64 if isinstance(local, int) else torch.float32
        value = torch.tensor([local], dtype=dtype, device=device)
        work: Any = dist.all_reduce(value, op, group, async_op=True)
        return cls(local, value, group, work, room_on_host(value))

    @functools.cached_property
    def result(self) -> float:
        """The sum, once it is there."""
        return read_behind(self.work, self.value, self.copy).item()

    def root(self) -> float | torch.Tensor:
        """Return the norm as `get_grad_norm_fp32` gives it."""
        if not compat.has_tensor_norms():
            return self.result**0.5
        self.work.wait()
        return self.value.pow(0.5)

    def root_on_host(self) -> float | torch.Tensor:
        """Return the same, to the bit, where looking at it waits for nothing."""
        if not compat.has_tensor_norms():
            return self.result**0.5
        return torch.tensor([self.result], dtype=self.value.dtype).pow(0.5)


def room_on_host(value: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for a copy of `value`: page-locked, if it is on CUDA."""
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == 'cuda')


def read_behind(work: Any, value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return `value` on the host once `work`, which reduces it, is done; wait for nothing else.

    Args:
        work: of the reduction.
        value: that it writes.
        copy: memory of `room_on_host`, written where `value` is on CUDA.
    """
    if value.device.type != 'cuda':
        work.wait()
        return value
    with torch.cuda.stream(_reading(value.device)):
        work.wait()
        copy.copy_(value, non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
    copied.synchronize()
    return copy


@functools.cache
def _reading(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which numbers of `device` are copied to the host."""
    return torch.cuda.Stream(device)
