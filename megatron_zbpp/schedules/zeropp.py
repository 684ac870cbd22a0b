"""ZeroPP: blocks of forwards, input gradients and weight gradients, a unit at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from megatron_zbpp.ir import B, F, Pass, Placement, Schedule, W
from megatron_zbpp.schedules.construct.orders import chunk_by_chunk, even_groups
from megatron_zbpp.schedules.family import ANY, Family


def zeropp(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Units of about p microbatches: a block of F per chunk, a block of B per chunk, then Ws.

    Tang et al., ZeroPP, arXiv 2402.03791. What could be known of it is its abstract: F, B and W are
    split, and run blockwise over the chunks inside a unit of U microbatches, so that FSDP gathers
    the weights of a chunk once for each block and unit. The paper's order within a unit, its choice
    of U and its own formulas could not be obtained; what follows is this library's reading, and the
    formulas are its own. U = p, the fewest without waits between chunks (2p-2 for v = 1; units are
    made even as the groups of `interleaved`). On rank s, 2(p-1-s) Ws of each unit are kept for the
    next unit's wait between its last F and its first B.

    - Bubble: (p-1)(F+B)/v for F=B=W and m >= U, once and not once a unit.
    - Peak memory: U + 2(p-1)/v activations on rank 0 from the second unit on, where U divides m.
    - When: with FSDP and m too large for `breadth-first`, whose memory grows with m. Without FSDP
      `zb-interleaved` has less bubble in less memory.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    most_kept = 2 * (num_ranks - 1)  # Ws, which one unit must have
    units = even_groups(num_microbatches, max(num_ranks, -(-most_kept // num_chunks)))
    orders = (
        _in_units(placement.stages(rank), units, keep=most_kept - 2 * rank)
        for rank in range(num_ranks)
    )
    return Schedule.of('zeropp', placement, num_microbatches, orders)


def _in_units(stages: tuple[int, ...], units: list[int], keep: int) -> Iterator[Pass]:
    """One rank's order: `keep` of a unit's Ws come after the forwards of the next."""
    pending: deque[Pass] = deque()
    first = 0
    for size in units:
        yield from chunk_by_chunk(F, stages, [size], first)
        yield from pending
        pending.clear()
        backwards = chunk_by_chunk(B, stages, [size], first)
        yield from backwards
        pending.extend(p._replace(kind=W) for p in backwards)
        while len(pending) > keep:
            yield pending.popleft()
        first += size
    yield from pending


FAMILY = Family(
    name='zeropp',
    generate=zeropp,
    summary='blocks of F, B and W, a unit of p microbatches at a time, for FSDP',
    bubble='(p-1)(F+B)/v (F=B=W)',
    memory='p + 2(p-1)/v',
    source='ZeroPP, arXiv 2402.03791, as far as its abstract tells',
    chunks=ANY,
    default_chunks=2,
    options=('num_chunks',),
)
