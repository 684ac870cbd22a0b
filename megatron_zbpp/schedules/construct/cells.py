"""Pairs of passes that run as one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from megatron_zbpp.ir import Pass, Schedule


def joined(schedule: Schedule, pairs: Iterable[Iterable[tuple[Pass, Pass]]]) -> Schedule:
    """Return a schedule whose ranks run these pairs as one, where they follow each other.

    Args:
        schedule: the order.
        pairs: of each rank, those that it has.
    """
    cells = set(itertools.chain.from_iterable(pairs))
    found = (
        (rank, at)
        for rank, order in enumerate(schedule.passes)
        for at, pair in enumerate(itertools.pairwise(order))
        if pair in cells
    )
    return replace(schedule, together=frozenset(found))
