"""Building blocks of orders that several families share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from megatron_zbpp.ir import B, F, Pass, W


def one_forward_one_backward(
    forwards: Sequence[Pass], backwards: Sequence[Pass], warmup: int
) -> Iterator[Pass]:
    """`warmup` forwards, then a forward and a backward by turns, then the rest of the backwards."""
    warmup = min(warmup, len(forwards))
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


def defer_weights(order: Iterable[Pass], defer: int) -> Iterator[Pass]:
    """`order` with its W passes: a W follows a B once more than `defer` Bs have none yet.

    First B, first W; what is left comes at the end.
    """
    pending: deque[Pass] = deque()
    for p in order:
        yield p
        if p.kind == B:
            pending.append(p._replace(kind=W))
            if len(pending) > defer:
                yield pending.popleft()
    yield from pending


def even_groups(num_microbatches: int, size: int) -> list[int]:
    """Sizes of as many groups of at least `size` microbatches as there can be, as even as possible.

    One group of all where there are fewer than `size`.
    """
    count = max(1, num_microbatches // size)
    smaller, larger = divmod(num_microbatches, count)
    return [smaller + 1] * larger + [smaller] * (count - larger)


def chunk_by_chunk(
    kind: str, stages: Sequence[int], groups: Iterable[int], first: int = 0
) -> list[Pass]:
    """For each group of microbatches, all of one stage, then all of the next.

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
