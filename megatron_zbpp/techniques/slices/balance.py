"""HOW LONG passes of slices take, and the sizes with which all slices take the same.

Of causal attention a slice computes the pairs of its tokens with all tokens up to them. So tokens
[a, b) cost c1 (b - a) + c2 (b^2 - a^2), c1 for what treats each token by itself. Backward takes 2.5
forwards of attention (recomputed scores, three products) and has no W of it; of all else the costs
say what F, B and W take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum, sqrt
from typing import NamedTuple

from megatron_zbpp.ir import B, F, Placement, W
from megatron_zbpp.ir.costs import Costs

_ROUNDS = 20_000


def non_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the least squares solution of which nothing is below 0, by coordinates.

    >>> [round(x, 6) for x in non_negative([[1, 1], [0, 2], [1, 0]], [3, 4, 1])]
    [1.0, 2.0]
    """
    count = len(rows[0])
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(count)] for i in range(count)]
    wanted = [sum(row[i] * v for row, v in zip(rows, values, strict=True)) for i in range(count)]
    solved = [0.0] * count
    for _ in range(_ROUNDS):
        moved = 0.0
        for i in range(count):
            rest = wanted[i] - sum(gram[i][j] * solved[j] for j in range(count) if j != i)
            value = max(0.0, rest / gram[i][i]) if gram[i][i] else 0.0
            moved = max(moved, abs(value - solved[i]))
            solved[i] = value
        if moved <= 1e-13 * max(solved):
            break
    return solved


TILE = 128  # kernels work in tiles of so many tokens
_BACKWARD = 2.5  # forwards of attention that its backward takes


@dataclass(frozen=True)
class Attention:
    """Parts of the time of F of a whole sequence."""

    # of its time, attention over pairs of tokens; 0 where no layer attends to the whole sequence
    share: float = 0.0
    fixed: float = 0.0  # time of a pass however short its slice, in times of F of a whole sequence

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


def fit_attention(times: Mapping[int, float], length: int) -> Attention:
    """Return the parts of F of sequences of `length` tokens, fitted to measured times of F.

    They are fitted by what grows with tokens and with pairs of them, and of three or more by what
    is the same for all. `times` are of F of one stage, by the tokens of a sequence.
    """
    if len(times) < 2 or min(times.values()) <= 0:
        raise ValueError(
            'measured times of F tell what attention takes by two lengths or more, and none is 0: '
            'give such as 8192=21.5,32768=140'
        )
    powers = (1, 2) if len(times) == 2 else (0, 1, 2)
    # each as a share of what was measured: short sequences count as much as long ones
    rows = [[(tokens / length) ** k / time for k in powers] for tokens, time in times.items()]
    found = dict(zip(powers, non_negative(rows, [1.0] * len(rows)), strict=True))
    whole = sum(found.values())
    return Attention(found[2] / whole, found.get(0, 0.0) / whole)


def balanced(
    slices: int, length: int, attention: Attention, costs: Costs, multiple: int = TILE
) -> tuple[int, ...]:
    """Return the tokens of slices whose F, B and W take the same time together.

    The last slice takes what is left of multiples of `multiple`.
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

    `sizes` are the tokens of each slice, or their shares.
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


_BACK = 7 / 4
"""Tensors of a block's backward, Q, K, V, dO and dQ, dK, dV, over Q, K, V and O of its forward."""


class Move(NamedTuple):
    """A block that another rank computes: queries of slice `query`, keys of slice `key`."""

    query: int
    key: int
    source: int
    target: int


class Load(NamedTuple):
    """Blocks that a rank computes for a slice, and those that it sends or is sent."""

    blocks: float
    moved: int


def moves(running: tuple[int, ...]) -> tuple[Move, ...]:
    """Return the blocks that move while rank r runs slice `running[r]`.

    >>> moves((3, 2, 1, 0))
    (Move(query=3, key=0, source=0, target=3),)
    """
    loads = [part + 0.5 for part in running]
    given = [0] * len(running)
    found = list[Move]()
    while max(loads) - min(loads) > 1:
        source, target = loads.index(max(loads)), loads.index(min(loads))
        found.append(Move(running[source], given[source], source, target))
        given[source] += 1
        loads[source] -= 1
        loads[target] += 1
    return tuple(found)


def loads(num_ranks: int, slices: int) -> list[list[Load]]:
    """Return the work of each rank while it runs each slice, in a full pipeline."""
    found = [[Load(0.0, 0)] * slices for _ in range(num_ranks)]
    for tick in range(slices):
        running = tuple((tick - rank) % slices for rank in range(num_ranks))
        exchanged = moves(running)
        for rank, part in enumerate(running):
            out = sum(move.source == rank for move in exchanged)
            into = sum(move.target == rank for move in exchanged)
            found[rank][part] = Load(part + 0.5 - out + into, out + into)
    return found


def exchanged(
    costs: Costs, placement: Placement, slices: int, attention: Attention, wire: float = 0.0
) -> Costs:
    """Return costs of equal slices whose attention ranks even out.

    `wire` is the time that a pass waits for a block that moves: Q, K and V there, O back. Of a
    backward it is 7/4 as much.
    """
    plain = in_parts(costs, (1,) * slices, attention)
    found, whole = loads(placement.num_ranks, slices), slices**2 / 2
    parts = dict[str, list[tuple[float, ...]]]()
    for kind, times in ((F, 1.0), (B, _BACK)):
        fixed, linear, pairs = attention.of(kind)
        for stage, time in enumerate(costs.times[kind]):
            wait = wire * times / time if time else 0.0
            own = found[placement.only_route[stage]]
            parts.setdefault(kind, []).append(
                tuple(
                    fixed + linear / slices + pairs * load.blocks / whole + wait * load.moved
                    for load in own
                )
            )
    return plain.with_parts(**parts)
