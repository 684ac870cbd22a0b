"""Partial state of an optimizer step, from the ranks before, and whether a rank may step on it.

(Zero Bubble Pipeline Parallelism, section 4: partially reduced states.) The sum here only decides
who steps early; what the step is judged by in the end is reduced as Megatron reduces it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_TAG = 4  # channels of messages, shapes and activations have those below


@dataclass(frozen=True)
class Prefix:
    """The state of the first ranks of the chain.

    Attributes:
        squared_norm: of their gradients; infinite if one found an overflow or cannot go ahead.
        ahead: how many of them have gone ahead.
    """

    squared_norm: float = 0.0
    ahead: int = 0

    def then(self, squared_norm: float, clip_grad: float) -> Prefix:
        """Return it with one rank more, which goes ahead exactly if the state allows it."""
        total = self.squared_norm + squared_norm
        return Prefix(total, self.ahead + is_clean(math.sqrt(total), clip_grad))


def is_clean(norm: float, clip_grad: float) -> bool:
    """Return whether a step with gradients of this norm would be neither skipped nor clipped.

    Args:
        norm: of all gradients.
        clip_grad: the norm from which Megatron clips them; 0: never.
    """
    return math.isfinite(norm) and (clip_grad <= 0 or clip_grad / (norm + 1e-6) >= 1)


class PartialReduction:
    """Passes prefixes from rank to rank.

    Args:
        pp_group: the pipeline group.
        order: its ranks, first to last.
        device: where messages between its ranks live.

    Attributes:
        place: of this rank in the chain.
        last: whether it is the last.
    """

    def __init__(
        self, pp_group: dist.ProcessGroup, order: tuple[int, ...], device: torch.device
    ) -> None:
        self.place = order.index(dist.get_rank(pp_group))
        self.last = self.place == len(order) - 1
        ranks = [dist.get_global_rank(pp_group, rank) for rank in order]
        self._before = ranks[self.place - 1] if self.place else None
        self._behind = ranks[self.place + 1] if self.place + 1 < len(ranks) else None
        self._pp_group = pp_group
        self._device = device
        self._leaving: tuple[dist.Work, torch.Tensor] | None = None

    def extend(self, squared_norm: float, clip_grad: float) -> Prefix:
        """Wait for the ranks before, add this one, and tell the ranks behind."""
        prefix = self._receive().then(squared_norm, clip_grad)
        if self._behind is not None:
            if self._leaving is not None:
                self._leaving[0].wait()
            values = [prefix.squared_norm, prefix.ahead]
            tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
            work: Any = dist.isend(tensor, self._behind, group=self._pp_group, tag=_TAG)
            self._leaving = work, tensor  # held until it has left
        return prefix

    def _receive(self) -> Prefix:
        if self._before is None:
            return Prefix()
        tensor = torch.empty(2, dtype=torch.float64, device=self._device)
        dist.recv(tensor, self._before, group=self._pp_group, tag=_TAG)
        squared_norm, ahead = tensor.tolist()
        return Prefix(squared_norm, int(ahead))
