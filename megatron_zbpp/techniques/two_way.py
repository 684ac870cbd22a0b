"""Two-way pipelines by their names: Chimera, GEMS, DualPipe and BitPipe.

Microbatch 2j goes down the ranks, 2j+1 up. Formulas count the ranks of both halves as p, and the
microbatches of both ways as m.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from megatron_zbpp.ir import BW, B, F, Pass, Placement, Schedule, Together, W
from megatron_zbpp.schedules.v_controlled import dualpipe_v


def unfolded(name: str, schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return a schedule of a V as one of both ways, each of which takes every other microbatch."""
    half = schedule.num_ranks
    if schedule.placement != Placement.v(half):
        raise ValueError(
            f'{schedule.name} cannot be unfolded because its stages are not in a V: take one such '
            'as zb-v'
        )

    def on(rank: int, p: Pass) -> Pass:
        first_half, before_turn = rank < half, p.stage < half
        return p._replace(microbatch=2 * p.microbatch + (first_half != before_turn))

    def order(rank: int) -> Iterable[Pass | Together]:
        for entry in schedule.order(min(rank, 2 * half - 1 - rank)):
            passes = entry.passes if isinstance(entry, Together) else (entry,)
            kept = tuple(q for p in passes if (q := on(rank, p)).microbatch < num_microbatches)
            yield from kept if len(kept) < 2 else (Together(kept),)

    placement = Placement.two_way(2 * half)
    return Schedule.of(name, placement, num_microbatches, map(order, range(2 * half)))


Slots = Callable[[int, int], tuple[int, int]]  # of j-th microbatch of a way, stage: F's and BW's


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Chimera: two pipelines against each other, units of p microbatches directly concatenated.

    Li and Hoefler, Chimera, arXiv 2107.06925. Each rank holds a stage of either way. Where F and BW
    take the same time, units follow each other without a further bubble; where BW takes longer,
    each unit adds one.

        >>> print(grid(chimera(4, 4), width=76))
        rank 0   0F0   0F2   3F1   3BW1  3F3   3BW3  0BW0  0BW2
        rank 1   1F0   2F1   1F2   2F3   2BW1  1BW0  2BW3  1BW2
        rank 2   1F1   2F0   1F3   2F2   2BW0  1BW1  2BW2  1BW3
        rank 3   0F1   0F3   3F0   3BW0  3F2   3BW2  0BW1  0BW3

    - Bubble where F=B=W, for p dividing m: (m/p+1)(p-2)F, which grows with m: from 3p microbatches
      on it is more than 1F1B's. Where F=B+W: (p-2)F whatever m is.
    - Peak memory: p activations, most of them on the middle ranks; and two copies of the weights.
    """
    p = num_ranks

    def slots(j: int, stage: int) -> tuple[int, int]:  # each unit 2p slots behind the last
        unit, own = divmod(j, p // 2)
        start = 2 * p * unit + 2 * own
        return start + stage, start + 2 * p - 1 - stage

    return _by_slots('chimera', p, num_microbatches, slots)


def chimera_zb(num_ranks: int, num_microbatches: int) -> Schedule:
    """Chimera-ZB: Chimera whose input gradients leave before the weight gradients are computed.

    Each BW of `chimera` becomes B and W in its place (Qi et al., arXiv 2401.10241): no pass moves.

        >>> print(grid(chimera_zb(2, 2), width=76))
        rank 0   0F0  1F1  1B1  1W1  0B0  0W0
        rank 1   0F1  1F0  1B0  1W0  0B1  0W1

    - Bubble where F=B=W, for p dividing m: at most (p-2)F, whatever m is.
    - Peak memory: p activations, as `chimera`; and two copies of the weights.
    """
    whole = chimera(num_ranks, num_microbatches)
    orders = (chain.from_iterable(map(_split, order)) for order in whole.passes)
    return Schedule.of('chimera-zb', whole.placement, num_microbatches, orders)


def chimera_doubling(num_ranks: int, num_microbatches: int) -> Schedule:
    """Chimera with forward doubling: two forwards take the time of one backward.

    Li and Hoefler, Chimera, arXiv 2107.06925, section 3.5. Units of 2p microbatches; two forwards
    run one after the other.

        >>> print(grid(chimera_doubling(2, 4), width=76))
        rank 0   0F0   0F2   1F1   1F3   1BW1  0BW0  1BW3  0BW2
        rank 1   0F1   0F3   1F0   1F2   1BW0  0BW1  1BW2  0BW3

    - Peak memory: 2p activations, so meant together with recomputation; and two copies of the
      weights.
    """
    p = num_ranks

    def slots(j: int, stage: int) -> tuple[int, int]:  # two forwards in one
        unit, own = divmod(j, p)
        pair, member = divmod(own, 2)
        start = 3 * p * unit + stage
        return start + 2 * pair, start + 4 * pair + 2 * member + 2 * p - 1 - 2 * stage

    return _by_slots('chimera-doubling', p, num_microbatches, slots)


def gems(num_ranks: int, num_microbatches: int) -> Schedule:
    """GEMS: each rank runs F and BW of one microbatch after the other, ways by turns.

    Jain et al., GEMS: GPU-Enabled Memory-Aware Model-Parallelism System, SC 2020. The forward of a
    microbatch follows the backward of the one before through the ranks.

        >>> print(grid(gems(2, 4), width=76))
        rank 0   0F0   0BW0  1F1   1BW1  0F2   0BW2  1F3   1BW3
        rank 1   1F0   1BW0  0F1   0BW1  1F2   1BW2  0F3   0BW3

    - Peak memory: 1 activation on every rank; and two copies of the weights.
    """
    placement = Placement.two_way(num_ranks)
    orders: list[list[Pass]] = [[] for _ in range(num_ranks)]
    for i in range(num_microbatches):
        for stage in range(num_ranks):
            orders[placement.rank_of(stage, i)] += Pass(F, stage, i), Pass(BW, stage, i)
    return Schedule.of('gems', placement, num_microbatches, orders)


def dualpipe(num_ranks: int, num_microbatches: int, together: bool = False) -> Schedule:
    """DualPipe: `dualpipe-v` on half the ranks, with the V unfolded onto two copies of the model.

    DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437. With `together` a pair is one cell. With fewer than
    2p microbatches, or an odd number, it is the order of more without the missing ones.

        >>> print(grid(dualpipe(2, 4), width=76))
        rank 0   0F0   1F1   0F2   1BW1  1F3   0BW0  1BW3  0B2   0W2
        rank 1   0F1   1F0   0F3   1BW0  1F2   0BW1  1BW2  0B3   0W3

    - Bubble where F=B=W, m >= 2p: (p/2-1)F, whatever m is. The published formula, twice that, is of
      pairs that start when both inputs are there.
    - Peak memory: p + 1 activations on every rank; and two copies of the weights.
    """
    Placement.two_way(num_ranks)  # there is one
    half = dualpipe_v(num_ranks // 2, -(-num_microbatches // 2), together)
    return unfolded('dualpipe', half, num_microbatches)


def bitpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """BitPipe: two Vs against each other, in units of p microbatches.

    Wu et al., BitPipe, arXiv 2410.19367. A rank holds two stages of either way. Where m is no
    multiple of p, the order of the next multiple without the missing microbatches.

        >>> print(grid(bitpipe(2, 2), width=76))
        rank 0   0F0   1F1   2F1   3F0   3BW0  2BW1  1BW1  0BW0
        rank 1   0F1   1F0   2F0   3F1   3BW1  2BW0  1BW0  0BW1

    - Peak memory: p activations, most of them on the middle ranks; and two copies of the weights.
    """
    placement = Placement.v(num_ranks).both_ways()
    units = -(-num_microbatches // num_ranks)
    orders = (
        [p for p in _bitpipe(placement, rank, units) if p.microbatch < num_microbatches]
        for rank in range(num_ranks)
    )
    return Schedule.of('bitpipe', placement, num_microbatches, orders)


def _by_slots(name: str, num_ranks: int, num_microbatches: int, slots: Slots) -> Schedule:
    placement = Placement.two_way(num_ranks)
    found: list[list[tuple[int, int, Pass]]] = [[] for _ in range(num_ranks)]
    for i in range(num_microbatches):
        for stage in range(num_ranks):
            own = found[placement.rank_of(stage, i)]
            for kind, slot in zip((F, BW), slots(i // 2, stage), strict=True):
                own.append((slot, i, Pass(kind, stage, i)))
    orders = ([p for *_, p in sorted(own)] for own in found)
    return Schedule.of(name, placement, num_microbatches, orders)


def _split(p: Pass) -> tuple[Pass, ...]:
    return (p._replace(kind=B), p._replace(kind=W)) if p.kind == BW else (p,)


def _bitpipe(placement: Placement, rank: int, units: int) -> Iterator[Pass]:
    """Yield one rank's passes: of each way's next microbatch, by letters for way and chunk."""
    p, half = placement.num_ranks, placement.num_ranks // 2
    near = int(rank >= half)
    letters: dict[str, tuple[int, int]] = {}
    for way, names in ((near, 'AC'), (1 - near, 'XD')):  # on the near way its Fs come first
        held = (s for s, on in enumerate(placement.routes[way]) if on == rank)
        letters |= {name: (way, stage) for name, stage in zip(names, held, strict=True)}
    own = half - rank if rank < half else rank - half + 1
    other = half - own
    forwards = 'A' * own + 'XA' * other + 'XD' * own + 'CD' * other + 'C' * own
    backwards = 'C' * own + 'DC' * other + 'DX' * own + 'AX' * other + 'A' * own
    ahead = p + half + min(rank, p - 1 - rank)
    steady = 2 * p - ahead
    between = (F, BW) * steady + (BW,) * (ahead - steady + 1)
    between += (F, BW) * (steady - 1) + (F,) * (ahead - steady + 1)
    kinds = (F,) * ahead + between * (units - 1) + (F, BW) * steady + (BW,) * (2 * p - steady)
    coming = {kind: iter(own * units) for kind, own in ((F, forwards), (BW, backwards))}
    counts: dict[tuple[str, str], int] = {}
    for kind in kinds:
        letter = next(coming[kind])
        way, stage = letters[letter]
        done = counts[kind, letter] = counts.get((kind, letter), -1) + 1
        yield Pass(kind, stage, 2 * done + way)
