"""Shards that wait for W: of a tensor that sequence parallelism gathers, this rank's rows.

Between B and W each rank keeps its own rows, and W gathers them again. Who begins the gather before
it needs the whole lets it overlap with the computation in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Shard:
    """This rank's rows of a tensor that the ranks of `group` hold together, in their order."""

    def __init__(self, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.rows = rows.detach().contiguous()  # a thread of the backend writes: it sees no no_grad
        self._group = group
        self._coming: tuple[torch.Tensor, dist.Work] | None = None  # the whole

    @classmethod
    def of(cls, whole: torch.Tensor, group: dist.ProcessGroup) -> Shard:
        """Return a copy of this rank's rows, so that `whole` can go."""
        return cls(whole.chunk(group.size())[group.rank()].clone(), group)

    def start(self) -> None:
        """Begin the gather."""
        self._coming = self._started()

    def gather(self) -> torch.Tensor:
        """Return the whole tensor; what it is computed from next waits for it."""
        whole, work = self._started()
        work.wait()
        self._coming = None
        return whole

    def _started(self) -> tuple[torch.Tensor, dist.Work]:
        if self._coming is not None:
            return self._coming
        rows, ranks = self.rows, self._group.size()
        whole = rows.new_empty((rows.shape[0] * ranks, *rows.shape[1:]))
        work: Any = dist.all_gather_into_tensor(whole, rows, group=self._group, async_op=True)
        return whole, work


def start_all(shards: Sequence[Shard]) -> Callable[[], None] | None:
    """Return the function that begins gathers of parameters; None without gathers."""

    def start() -> None:
        for shard in shards:
            shard.start()

    return start if shards else None
