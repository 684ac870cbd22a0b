"""A number that all ranks of a group sum up, begun in one half of a step and read in the other.

Between the two halves forwards of the next iteration run ahead. On CUDA the number is read on a
stream of its own, behind the reduction alone: the host does not wait until the device has run those
forwards, and has the rest of the step and of the next iteration queued behind them by then.
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
        copy = torch.empty(1, dtype=dtype, pin_memory=device.type == 'cuda')
        return cls(local, value, group, work, copy)

    @functools.cached_property
    def result(self) -> float:
        """The sum, once it is there."""
        if self.value.device.type != 'cuda':
            self.work.wait()
            return self.value.item()
        with torch.cuda.stream(_reading(self.value.device)):
            self.work.wait()
            self.copy.copy_(self.value, non_blocking=True)
            copied = torch.cuda.current_stream().record_event()
        copied.synchronize()
        return self.copy.item()

    def root(self) -> float | torch.Tensor:
        """As `get_grad_norm_fp32` gives it."""
        if not compat.has_tensor_norms():
            return self.result**0.5
        self.work.wait()
        return self.value.pow(0.5)

    def root_on_host(self) -> float | torch.Tensor:
        """Return the same, to the bit, where looking at it waits for nothing."""
        if not compat.has_tensor_norms():
            return self.result**0.5
        return torch.tensor([self.result], dtype=self.value.dtype).pow(0.5)


@functools.cache
def _reading(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which numbers of `device` are copied to the host."""
    return torch.cuda.Stream(device)
