"""Ranks agree, while they compute, on whether weights are those that forwards ran ahead with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_zbpp.mcore.post_validation.entry_state import EntryState
from megatron_zbpp.mcore.post_validation.reduction import read_behind, room_on_host
from megatron_zbpp.post_validation.watch import Watch, summary

RANDOM = 'random states'


@dataclass(frozen=True)
class Verdict:
    """The ranks' verdict on an iteration that had begun before its call.

    Attributes:
        changed: the first rank that has found a change; None: nobody has.
        prefilled: whether gradients of some rank were not zero when the iteration began.
    """

    changed: int | None
    prefilled: bool


@dataclass(frozen=True)
class Agreement:
    """A question to all ranks, on its way; the answer is there when the iteration ends at latest.

    Attributes:
        entry: what the iteration of this rank began with.
        watch: its weights; None: no forward of it had run ahead.
        changes: what it has found.
    """

    entry: EntryState
    watch: Watch | None
    changes: list[str]
    _flags: torch.Tensor
    _work: Any
    _copy: torch.Tensor

    @classmethod
    def begin(
        cls, entry: EntryState, watch: Watch | None, changes: list[str], device: torch.device
    ) -> Agreement:
        """Ask: all ranks do, with what they have found.

        Args:
            entry: of this iteration.
            watch: the weights, where forwards ran ahead.
            changes: what the host knows to have changed.
            device: where the ranks' messages are.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        found = [rank if changes else size, size - entry.prefilled]
        flags = torch.empty(2, dtype=torch.int64, device=device)
        for flag, value in zip(flags, found, strict=True):
            flag.fill_(value)  # by a kernel: a copy from the host waits for forwards that run ahead
        differ = None if watch is None or changes else watch.differ()
        if differ is not None:  # on its device: the host does not wait for it
            flags[0] = torch.where(differ, rank, size)
        work: Any = dist.all_reduce(flags, dist.ReduceOp.MIN, async_op=True)
        return cls(entry, watch, changes, flags, work, room_on_host(flags))

    def verdict(self) -> Verdict:
        """Return what all ranks have found together."""
        changed, prefilled = read_behind(self._work, self._flags, self._copy).tolist()
        size = dist.get_world_size()
        return Verdict(None if changed == size else changed, prefilled < size)

    def found(self) -> str:
        """Return what this rank has found, in words."""
        different = [] if self.watch is None else self.watch.different()
        return summary([*self.changes, *different])
