"""Building blocks of orders that several families share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ..ir import BW, B, Pass, W


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


def split(order: Iterable[Pass]) -> Iterator[Pass]:
    """`order` with each fused backward as a B and, at once, its W."""
    for p in order:
        if p.kind == BW:
            yield p._replace(kind=B)
            yield p._replace(kind=W)
        else:
            yield p
