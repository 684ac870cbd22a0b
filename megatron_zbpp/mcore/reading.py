"""Compare what the chunks of a two-way pipeline read of each microbatch, in the first iteration.

A chunk on the data of the wrong replica would train on other labels without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron_zbpp.ir import Placement


def require_asked(schedule: str, asked: bool) -> None:
    """Check that the training loop knows that a chunk may read another replica's data.

    Raises:
        ValueError: it never asked.
    """
    if not asked:
        raise ValueError(
            f'with {schedule} a chunk may read the data of another replica, and this '
            'loop never asked whose: take megatron_zbpp.data_parallel_rank(vp_stage) where it has '
            'parallel_state.get_data_parallel_rank()'
        )


class _Noting:
    """Iterates over `source`, and notes digests of the tensors in each item."""

    def __init__(self, source: Iterator, noted: list[dict[str, str]]) -> None:
        self._source, self._noted = source, noted

    def __iter__(self) -> _Noting:
        return self

    def __next__(self) -> Any:
        item = next(self._source)
        self._noted.append(_digests(item))
        return item


class Reading:
    """Digests of the items that each chunk of this rank reads, by stage."""

    def __init__(self) -> None:
        self._noted: dict[int, list[dict[str, str]]] = {}

    def of(self, stage: int, source: Iterator | None) -> Iterator | None:
        """Return what gives what `source` gives to a stage, and notes what tensors are in it."""
        if source is None:
            return None
        return _Noting(source, self._noted.setdefault(stage, []))

    def compare(
        self,
        placement: Placement,
        group: dist.ProcessGroup,
        collective: Callable[[str], AbstractContextManager],
    ) -> None:
        """Check that the stages of each way have read the same data: a collective.

        Args:
            placement: of the stages, both ways.
            group: the pipeline's ranks.
            collective: around what waits for other ranks.

        Raises:
            ValueError: on all ranks, if a tensor that two stages have read is not the same.
        """
        found: list[Any] = [None] * group.size()
        with collective('comparison of the data that chunks have read'):
            dist.all_gather_object(found, self._noted, group=group)
        ranks = dist.get_process_group_ranks(group)
        for route in placement.routes:
            read = [(ranks[rank], found[rank].get(s)) for s, rank in enumerate(route)]
            first, *others = [(rank, items) for rank, items in read if items] or [(0, [])]
            for other in others:
                _require_same(first, other)


def _require_same(
    one: tuple[int, list[dict[str, str]]], other: tuple[int, list[dict[str, str]]]
) -> None:
    for j, (mine, theirs) in enumerate(zip(one[1], other[1], strict=False)):
        differ = [name for name in mine if theirs.get(name, mine[name]) != mine[name]]
        if differ:
            raise ValueError(
                f'data of rank {other[0]} are wrong because in its microbatch {j} '
                f'{", ".join(differ)} are not those of rank {one[0]}, whose microbatches it goes '
                'on with: let each chunk read the data of the data-parallel rank that '
                'megatron_zbpp.data_parallel_rank(vp_stage) returns'
            )


def _digests(item: Any, name: str = 'item') -> dict[str, str]:
    """Return a digest of each tensor in an item, by its place in it."""
    if isinstance(item, torch.Tensor):
        plain = item.detach().cpu().contiguous().flatten().view(torch.uint8)
        content = hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:16]
        return {name: f'{item.dtype}{tuple(item.shape)}{content}'}
    if isinstance(item, Mapping):
        parts = item.items()
    elif isinstance(item, list | tuple):
        parts = enumerate(item)
    else:
        return {}
    found: dict[str, str] = {}
    for key, part in parts:
        found |= _digests(part, f'{name}[{key!r}]')
    return found
