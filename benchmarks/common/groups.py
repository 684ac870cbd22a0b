"""Megatron's process groups, few: of those with equal ranks one, under several names.

Megatron makes some dozens, and gloo starts a thread for each that wakes a hundred times a second,
idle or not: with a few ranks a core that alone delays the passes that are to be measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def shared_groups() -> Iterator[None]:
    """Inside, `torch.distributed.new_group` makes a group once for each set of ranks."""
    original = dist.new_group
    made: dict[tuple[int, ...], Any] = {tuple(range(dist.get_world_size())): dist.group.WORLD}

    def new_group(ranks: list[int] | None = None, **options: Any) -> Any:
        key = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        if key not in made:
            made[key] = original(list(key), **options)
        return made[key]

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = original
