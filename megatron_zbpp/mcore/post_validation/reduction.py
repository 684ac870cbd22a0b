"""A number that all ranks of a group sum up, begun in one half of a step and read in the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_zbpp.mcore import compat


@dataclass(frozen=True)
class Reduction:
    """A number on its way over all ranks of `group`."""

    local: float
    value: torch.Tensor
    group: dist.ProcessGroup
    work: dist.Work

    @classmethod
    def begin(
        cls, local: float, op: Any, group: dist.ProcessGroup, device: torch.device
    ) -> Reduction:
        dtype = torch.int64 if isinstance(local, int) else torch.float32
        value = torch.tensor([local], dtype=dtype, device=device)
        work: Any = dist.all_reduce(value, op, group, async_op=True)
        return cls(local, value, group, work)

    def result(self) -> float:
        self.work.wait()
        return self.value.item()

    def root(self) -> float | torch.Tensor:
        """As `get_grad_norm_fp32` gives it."""
        if not compat.has_tensor_norms():
            return self.result() ** 0.5
        self.work.wait()
        return self.value.pow(0.5)
