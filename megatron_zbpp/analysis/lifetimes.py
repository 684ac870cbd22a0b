"""Lifetimes of activations: the one place that says which pass takes what a forward saves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from megatron_zbpp.ir import F, Pass


class Lifetime(NamedTuple):
    """Places in the order of a rank between which an activation is saved.

    Attributes:
        forward: that saves it.
        first: place of the forward.
        last: place of the pass that takes it: B, or R where that comes first.
    """

    forward: Pass
    first: int
    last: int


def lifetimes(
    order: Sequence[Pass], stages: Collection[int], copies: Collection[str] = ()
) -> Iterator[Lifetime]:
    """Yield the lifetimes of a rank, those that end first before others.

    Args:
        order: of the rank.
        stages: that count.
        copies: kinds of passes that move what is saved, and take nothing.
    """
    begun: dict[tuple[int, ...], int] = {}
    for at, p in enumerate(order):
        if p.stage not in stages or p.kind in copies:
            continue
        if p.kind == F:
            begun[p[1:]] = at
        elif p[1:] in begun:
            first = begun.pop(p[1:])
            yield Lifetime(order[first], first, at)
