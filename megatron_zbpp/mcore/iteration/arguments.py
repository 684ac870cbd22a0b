"""Arguments of a forward_backward function, as Megatron calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


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
