"""HOW LONG slices of a sequence are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

from megatron_zbpp.ir.graph import Graph

AUTO, BALANCED = 'auto', 'balanced'
LEAST = 4096  # tokens, a careful guess: docs/long-context.md


@dataclass(frozen=True)
class ToFind:
    """Slices of equal times, whose sizes are to be found."""

    number: int = 0  # of them; 0: as many as pay
    least: int = LEAST  # then, tokens of a slice, as a mean of all

    def __str__(self) -> str:
        if self.number:
            return f'{BALANCED}:{self.number}'
        return AUTO if self.least == LEAST else f'{AUTO}:{self.least}'


Slices = int | tuple[int, ...] | ToFind
"""How many slices, as equal as can be; or the tokens of each; or what finds them."""


def slices_of(asked: object) -> Slices:
    """Return what is asked for: a number, tokens of each slice, in text as `1024,512,512`, or text.

    That is `balanced:4`, `auto`, or `auto:2048` with the fewest tokens of a slice.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(asked, ToFind):
        return asked
    word, colon, number = str(asked).partition(':')
    if word == AUTO and not colon:
        return ToFind()
    if word in (AUTO, BALANCED) and (told := _whole(number)):
        return ToFind(least=told) if word == AUTO else ToFind(told)
    words: Iterable[object] = [asked]
    if isinstance(asked, str):
        words = asked.split(',')
    elif isinstance(asked, list | tuple):
        words = cast(Sequence[object], asked)
    found = tuple(map(_whole, words))
    if not found or min(found) < 1:
        raise ValueError(
            f'slices is {asked!r}: give how many, such as 4, or the tokens of each, such as '
            '1024,512,512, or balanced:4, or auto'
        )
    return found[0] if len(found) == 1 else found


def _whole(value: object) -> int:
    """Return a whole number, also from text; 0: it is none."""
    if isinstance(value, str):
        return int(value) if value.strip().isdecimal() else 0
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def number_of(slices: Slices) -> int:
    """Return how many slices there are; 0: that is to be found."""
    if isinstance(slices, ToFind):
        return slices.number
    return slices if isinstance(slices, int) else len(slices)


def cuts_of(slices: int | tuple[int, ...], length: int, multiple: int = 1) -> tuple[int, ...]:
    """Return the first token of each slice, and behind them the tokens of a sequence.

    Args:
        slices: how many, as equal as can be, the last one with what is left; or tokens of each.
        length: tokens of a sequence.
        multiple: of which tokens of each slice have to be: ranks that share a sequence out.

    Raises:
        ValueError: the sequence does not have so many, or others.
    """
    if isinstance(slices, tuple):
        return _given(slices, length, multiple)
    starts = (length * k // slices // multiple * multiple for k in range(slices))
    cuts = *starts, length
    if len(set(cuts)) < slices + 1:
        raise ValueError(
            f'slices: {slices} are too many for sequences of {length} tokens'
            f'{_in_multiples(multiple)}: give at most {max(length // multiple, 1)}'
        )
    return cuts


def sizes_of(graph: Graph) -> tuple[int, ...]:
    """Return the tokens of each slice; none: the graph does not say them, or has no slices."""
    for name, arguments in graph.techniques:
        if name == 'sliced' and len(arguments) > 1:
            return cast('tuple[int, ...]', arguments[1])
    return ()


def _given(sizes: tuple[int, ...], length: int, multiple: int) -> tuple[int, ...]:
    if sum(sizes) != length:
        raise ValueError(
            f'slices: {",".join(map(str, sizes))} are {sum(sizes)} tokens, but sequences have '
            f'{length}: give sizes that sum to that, or a number of slices'
        )
    uneven = next((size for size in sizes if size % multiple), None)
    if uneven is not None:
        raise ValueError(
            f'slices: {uneven} tokens cannot be shared out{_in_multiples(multiple)}: give '
            f'multiples of {multiple}'
        )
    return (0, *accumulate(sizes))


def _in_multiples(multiple: int) -> str:
    return f' among {multiple} ranks of tensor parallelism' if multiple > 1 else ''
