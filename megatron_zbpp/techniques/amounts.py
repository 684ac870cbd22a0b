"""Amounts of a technique on each rank: one grammar for flags, `enable` and `zbpp`."""

from __future__ import annotations

HALF, ALL = 'half', 'all'
Amount = str | int
"""'half', 'all', or how many chunks of each rank: the first, whose activations wait longest."""


def chunks_of(amount: Amount, num_chunks: int, what: str, words: tuple[str, ...] = ()) -> int:
    """Return how many chunks of a rank that is.

    Args:
        amount: 'half', 'all', or a number, also as text.
        num_chunks: of a rank.
        what: is done with them, for errors.
        words: that mean something else, and are no amount here, for errors.

    Raises:
        ValueError: none, or more than there are.
    """
    if amount == HALF:
        return (num_chunks + 1) // 2
    if amount == ALL:
        return num_chunks
    if isinstance(amount, str) and amount.isdecimal():
        amount = int(amount)
    if isinstance(amount, bool) or not isinstance(amount, int) or amount < 1:
        known = ', '.join(map(repr, (HALF, ALL, *words)))
        raise ValueError(f'{what} of {amount!r}: give {known} or a number of chunks')
    if amount > num_chunks:
        raise ValueError(
            f'{what} of {amount} chunks: a rank has {num_chunks}: give a number up to {num_chunks}'
        )
    return amount
