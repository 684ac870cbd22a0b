"""Chunks and groups of microbatches: the order in which a rank goes through them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_zbpp.ir import F, Pass


def even_groups(num_microbatches: int, size: int) -> list[int]:
    """Return sizes of as many groups of `size` microbatches or more as there can be, most even.

    One group of all where there are fewer than `size`.
    """
    count = max(1, num_microbatches // size)
    smaller, larger = divmod(num_microbatches, count)
    return [smaller + 1] * larger + [smaller] * (count - larger)


def chunk_by_chunk(
    kind: str, stages: Sequence[int], groups: Iterable[int], first: int = 0
) -> list[Pass]:
    """Return, group by group of microbatches, all of one stage, then all of the next.

    Args:
        kind: of the passes.
        stages: of one rank, in model order. F goes up through them, anything else down.
        groups: sizes of the groups.
        first: the first microbatch of the first group.
    """
    through = stages if kind == F else stages[::-1]
    passes: list[Pass] = []
    for size in groups:
        passes += [Pass(kind, stage, first + i) for stage in through for i in range(size)]
        first += size
    return passes
