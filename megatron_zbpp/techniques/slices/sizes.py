"""HOW LONG slices of a sequence are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum, sqrt
from typing import cast

from megatron_zbpp.ir import B, F, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import Graph

AUTO, BALANCED = 'auto', 'balanced'
LEAST = 4096  # tokens, a careful guess: docs/long-context.md


@dataclass(frozen=True)
class ToFind:
    """Slices of equal times, whose sizes are to be found.

    Attributes:
        number: of them; 0: as many as pay.
        least: then, tokens of a slice, as a mean of all.
    """

    number: int = 0
    least: int = LEAST

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


TILE = 128  # kernels work in tiles of so many tokens
_BACKWARD = 2.5  # forwards of attention that its backward takes


@dataclass(frozen=True)
class Attention:
    """Parts of the time of F of a whole sequence.

    Attributes:
        share: of its time, attention over pairs of tokens; 0 where no layer attends to the whole
            sequence.
        fixed: time of a pass however short its slice, in times of F of a whole sequence.
    """

    share: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if not (min(self.share, self.fixed) >= 0 and self.share + self.fixed <= 1):
            raise ValueError(
                f'attention takes {self.share:g} of F beside {self.fixed:g} that is fixed: give '
                'a share from 0 to 1'
            )

    def of(self, kind: str) -> tuple[float, float, float]:
        """Return of what passes of a kind are made: what is fixed, of tokens, and of pairs of them.

        They sum to 1. W has no pairs, as attention has no weights.
        """
        pairs = self.share * {B: _BACKWARD, W: 0.0}.get(kind, 1.0)
        whole = 1 - self.share + pairs
        if not whole:
            return 0.0, 1.0, 0.0
        return self.fixed / whole, (1 - self.share - self.fixed) / whole, pairs / whole


def balanced(
    slices: int, length: int, attention: Attention, costs: Costs, multiple: int = TILE
) -> tuple[int, ...]:
    """Return the tokens of slices whose F, B and W take the same time together.

    Args:
        slices: n.
        length: tokens of a sequence.
        attention: what F is made of.
        costs: of whole sequences, whose F, B and W are weighed.
        multiple: of which sizes are; the last slice takes what is left.

    Raises:
        ValueError: there would be slices without tokens.
    """
    made = [(fsum(costs.times[kind]), attention.of(kind)) for kind in (F, B, W)]
    linear, pairs = (fsum(time * own[k] for time, own in made) for k in (1, 2))
    if not linear + pairs:
        linear = 1.0
    # where linear x + pairs x^2 is k / n of the whole, without a difference of like numbers
    ends = (k / slices * (linear + pairs) for k in range(1, slices))
    cuts = [0.0, *(2 * end / (linear + sqrt(linear**2 + 4 * pairs * end)) for end in ends)]
    tokens = (*(round(cut * length / multiple) * multiple for cut in cuts), length)
    sizes = tuple(after - before for before, after in pairwise(tokens))
    if min(sizes) < 1:
        raise ValueError(
            f'slices: {slices} are too many for balanced slices of {length} tokens in multiples of '
            f'{multiple}: give fewer'
        )
    return sizes


def in_parts(costs: Costs, sizes: Sequence[int], attention: Attention) -> Costs:
    """Return costs with what each slice takes of them; what they say of slices themselves stays.

    Args:
        costs: of whole sequences.
        sizes: tokens of each slice, or their shares.
        attention: what F is made of.
    """
    length = sum(sizes)
    cuts = [end / length for end in accumulate(sizes, initial=0)]
    tokens = [b - a for a, b in pairwise(cuts)]
    pairs = [b**2 - a**2 for a, b in pairwise(cuts)]

    def shares(kind: str) -> tuple[float, ...]:
        fixed, linear, of_pairs = attention.of(kind)
        return tuple(fixed + linear * t + of_pairs * q for t, q in zip(tokens, pairs, strict=True))

    parts = {'activation': tuple(tokens), **{kind: shares(kind) for kind in (F, B, W)}}
    made = {name: (own,) * costs.num_stages for name, own in parts.items()}
    return costs.with_parts(**{**made, **costs.parts})
