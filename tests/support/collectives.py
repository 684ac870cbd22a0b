"""Collectives of this process, counted where they reach their process group."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

# of a process group, by the release of torch
_METHODS = {
    'all-gather': ('_allgather_base', 'all_gather_single', 'allgather'),
    'reduce-scatter': ('_reduce_scatter_base', 'reduce_scatter_single', 'reduce_scatter'),
    'all-reduce': ('allreduce',),
}


@contextmanager
def counted(chosen: Callable[[list[int]], bool] = lambda ranks: True) -> Iterator[Counter[str]]:
    """Give a counter, by kind, of what runs meanwhile in groups whose ranks are chosen."""
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        for kind, names in _METHODS.items():
            for name in names:
                if hasattr(dist.ProcessGroup, name):
                    original = getattr(dist.ProcessGroup, name)
                    counting = _counting(original, kind, chosen, found)
                    stack.enter_context(mock.patch.object(dist.ProcessGroup, name, counting))
        yield found


def _counting(original: Callable, kind: str, chosen: Callable, found: Counter[str]) -> Callable:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        found[kind] += chosen(dist.get_process_group_ranks(group))
        return original(group, *args, **kwargs)

    return call
