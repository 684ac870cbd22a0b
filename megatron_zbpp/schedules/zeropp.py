"""ZeroPP: blocks of forwards, input gradients and weight gradients, a unit at a time."""

from __future__ import annotations

from megatron_zbpp.ir import Phase, Placement, Schedule
from megatron_zbpp.schedules.construct.groups import even_groups
from megatron_zbpp.schedules.construct.phases import Row, phases
from megatron_zbpp.schedules.registry import Formula, Sizes, family


def _unit(num_ranks: int, num_chunks: int) -> int:
    """Return the fewest microbatches of a unit: p, or as many as have the 2(p-1) Ws of rank 0."""
    return max(num_ranks, -(-2 * (num_ranks - 1) // num_chunks))


def _peak(at: Sizes) -> float:
    return _unit(at.p, at.v) + 2 * (at.p - 1) / at.v


def _even(at: Sizes) -> bool:
    return at.m >= 2 * _unit(at.p, at.v) and at.m % _unit(at.p, at.v) == 0


@family(
    'zeropp',
    summary='blocks of F, B and W, a unit of p microbatches at a time, for FSDP',
    bubble=Formula(
        '(p-1)(F+B)/v (F=B=W)',
        lambda at: (at.p - 1) * (at.F + at.B) / at.v,
        lambda at: at.m >= _unit(at.p, at.v) and at.equal,
    ),
    memory=Formula('p + 2(p-1)/v', _peak, _even),
    source='ZeroPP, arXiv 2402.03791, as far as its abstract tells',
)
def zeropp(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Units of about p microbatches: a block of F per chunk, a block of B per chunk, then Ws.

    Tang et al., ZeroPP, arXiv 2402.03791. What could be known of it is its abstract: F, B and W are
    split, and run blockwise over the chunks inside a unit of U microbatches, so that FSDP gathers
    the weights of a chunk once for each block and unit. The paper's order within a unit, its choice
    of U and its own formulas could not be obtained; what follows is this library's reading, and the
    formulas are its own. U = p, the fewest without waits between chunks (2p-2 for v = 1; units are
    made even as the groups of `interleaved`). On rank s, 2(p-1-s) Ws of each unit are kept for the
    next unit's wait between its last F and its first B.

        >>> print(grid(zeropp(2, 4), width=76))
        rank 0   0F0  0F1  2F0  2F1  2B0  2B1  0B0  0B1  2W0  2W1  0F2  0F3  2F2…
        rank 1   1F0  1F1  3F0  3F1  3B0  3B1  1B0  1B1  3W0  3W1  1W0  1W1  1F2…

    - Bubble: (p-1)(F+B)/v for F=B=W and m >= U, once and not once a unit.
    - Peak memory: U + 2(p-1)/v activations on rank 0 from the second unit on, where U divides m.
    - When: with FSDP and m too large for `breadth-first`, whose memory grows with m. Without FSDP
      `zb-interleaved` has less bubble in less memory.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    units = even_groups(num_microbatches, _unit(num_ranks, num_chunks))
    orders = (
        _in_units(placement.stages(rank), units, keep=2 * (num_ranks - 1 - rank))
        for rank in range(num_ranks)
    )
    return Schedule.of('zeropp', placement, num_microbatches, orders)


def _in_units(stages: tuple[int, ...], units: list[int], keep: int) -> list[Phase]:
    """Return one rank's order: `keep` of a unit's Ws come after the forwards of the next."""
    table: list[Row] = []
    for number, size in enumerate(units):
        passes = len(stages) * size
        table += [
            (passes, 'F', f'unit {number}: F'),
            (keep, 'W', f'unit {number}: W kept from the one before'),
            (passes, 'B', f'unit {number}: B'),
            (passes - keep, 'W', f'unit {number}: W'),
        ]
    table.append((keep, 'W', 'W left'))
    return phases(stages, sum(units), table, units)
