"""2BP: GPipe and 1F1B whose weight gradients wait until a rank has nothing else to run."""

from __future__ import annotations

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules.construct.list_scheduling import list_schedule
from megatron_zbpp.schedules.construct.phases import phases
from megatron_zbpp.schedules.registry import Formula, family

SOURCE = '2BP: 2-Stage Backpropagation, arXiv 2405.18047, section 3'
_EVERYTHING = Formula('m', lambda at: at.m)


@family(
    '2bp',
    summary='GPipe with a split backward: all F, all B, all W',
    bubble=Formula('(p-1)(F+B)', lambda at: (at.p - 1) * (at.F + at.B)),
    memory=_EVERYTHING,
    source=SOURCE,
    aliases=('2BP-GPipe',),
)
def two_bp(num_ranks: int, num_microbatches: int) -> Schedule:
    """2BP on GPipe: no rank waits for the weight gradients of another.

    Rae et al., 2BP: 2-Stage Backpropagation, arXiv 2405.18047: backward-p1 is B, backward-p2 is W.
    The paper concatenates the microbatches of all backward-p2; here they stay one pass each, so
    that gradients add up to the same bits.

        >>> print(grid(two_bp(2, 3)))
        rank 0   0F0  0F1  0F2  0B0  0B1  0B2  0W0  0W1  0W2
        rank 1   1F0  1F1  1F2  1B0  1B1  1B2  1W0  1W1  1W2

    - Bubble: (p-1)(F+B), two thirds of GPipe's where F=B=W.
    - Peak memory: m activations on every rank.
    - When: to compare. `zb-h1` has less bubble in the memory of 1F1B.
    """
    m = num_microbatches
    table = [(m, 'F', 'forwards'), (m, 'B', 'input gradients'), (m, 'W', 'weight gradients')]
    orders = (phases([rank], m, table) for rank in range(num_ranks))
    return Schedule.of('2bp', Placement.loop(num_ranks), m, orders)


@family(
    '2bp-1f1b',
    summary='1F1B with a split backward whose W only fill waits',
    bubble=Formula(
        '(p-1)(F+B-W)', lambda at: (at.p - 1) * (at.F + at.B - at.W), lambda at: at.m >= at.p
    ),
    memory=_EVERYTHING,
    source=SOURCE,
    aliases=('2BP-1F1B-1', '2BP-1F1B-2'),
)
def two_bp_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """2BP on 1F1B: F and B as in 1F1B, W where a rank would wait, and what is left at the end.

    Rae et al., 2BP, arXiv 2405.18047: 1F1B-1 is m = p, 1F1B-2 is m = 2p.

        >>> print(grid(two_bp_1f1b(3, 4), width=76))
        rank 0   0F0  0F1  0F2  0B0  0F3  0B1  0W0  0B2  0W1  0B3  0W2  0W3
        rank 1   1F0  1F1  1B0  1F2  1B1  1F3  1B2  1W0  1B3  1W1  1W2  1W3
        rank 2   2F0  2B0  2F1  2B1  2F2  2B2  2F3  2B3  2W0  2W1  2W2  2W3

    - Bubble: (p-1)(F+B-W) for m >= p, as ZB-H1's, which needs 2p-1.
    - Peak memory: m activations on the last rank, whose W all come at the end.
    - When: p <= m < 2p. Else `zb-h1` has the same bubble in the memory of 1F1B.
    """
    p, m = num_ranks, num_microbatches
    placement = Placement.loop(p)
    tables = ([(p - 1 - rank, 'F', ''), (m, 'F B', ''), (m, 'W', '')] for rank in range(p))
    orders = [phases([rank], m, table)[:-1] for rank, table in enumerate(tables)]
    lanes = [[[each for phase in order for each in phase.passes]] for order in orders]
    return list_schedule(placement, m, lanes).schedule('2bp-1f1b')
