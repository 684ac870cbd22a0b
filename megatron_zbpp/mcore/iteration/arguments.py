"""Arguments of a forward_backward function, as Megatron calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_SIZES = 'num_microbatches', 'seq_length', 'micro_batch_size', 'decoder_seq_length'


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of one call of a forward_backward function, as Megatron names them."""

    forward_step_func: Callable
    data_iterator: Iterator | list[Iterator | None] | None
    model: torch.nn.Module | list[torch.nn.Module]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: Any = None  # where Megatron passes it on, it is an int or None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable | None = None
    p2p_communicator: Any = None  # its ring of neighbours would not do
    pg_collection: Any = None
    force_all_reduce: bool = False

    def same_size(self, other: Arguments) -> bool:
        """Return whether two calls have as many microbatches, of one shape."""
        return all(getattr(self, size) == getattr(other, size) for size in _SIZES)

    @property
    def models(self) -> list[torch.nn.Module]:
        """The chunks of this rank."""
        return self.model if isinstance(self.model, list) else [self.model]

    @property
    def iterators(self) -> list[Iterator | None]:
        """The data of each chunk."""
        if isinstance(self.data_iterator, list):
            return self.data_iterator
        return [self.data_iterator] * len(self.models)


def same(one: list, other: list) -> bool:
    """Return whether both lists have the same objects."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
