"""On a V placement: controllable memory (V-Half, V-Min, 1F1B-V), and pairs that hide messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from megatron_zbpp.ir import BW, B, F, Pass, Phase, Placement, Schedule, W
from megatron_zbpp.schedules.construct.building_blocks import orders, repeat, tighten, with_weights
from megatron_zbpp.schedules.construct.draft import Draft, list_schedule
from megatron_zbpp.schedules.construct.phases import first_microbatches, phases

_INTERVAL = 6  # slots from one microbatch to the next: F, B and W, or F and BW, of two chunks


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: (p+2)/2 of 1F1B's p activations and less than half of its bubble.

    Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: a building block
    whose stages are 2 slots apart on the way down the V and 1 on the way up.

        >>> print(grid(v_half(4, 4), width=76))
        rank 0   0F0  0F1  0F2  0F3  7F0  7B0  7F1  7B1  7W0  7F2  7B2  7W1  7W2…
        rank 1   1F0  1F1  1F2  1F3  6F0  6F1  6B0  6W0  6F2  6B1  6W1  6B2  1B0…
        rank 2   2F0  2F1  2F2  5F0  5F1  5F2  5B0  5W0  2F3  5B1  2B0  5B2  5W1…
        rank 3   3F0  4F0  3F1  4F1  3F2  4F2  4B0  3B0  4W0  3F3  3W0  4F3  4B1…

    The block, on rank r: F of chunk 0 in slot 2r; after the fold F of chunk 1 in 3p-2-r; from the
    loss on B of chunk 1 in 3p-1+2r; after the fold B of chunk 0 in 6p-2-r. So an activation of
    chunk 0 lives for 6p-2-3r slots and one of chunk 1 for 3r+1: 6p-1 together on every rank. With a
    microbatch every 6 slots that is p activations of a chunk, or half of 1F1B's p of a full rank.
    No two of a rank's four slots may be equal modulo 6. F of chunk 1 and B of chunk 0 are 3p apart,
    which for even p is 0: then every B comes 3 slots later, and no other pair meets.

    - Bubble where F=B=W, m >= 2p: (3p-7)/2 for even p >= 4, (3p-4)/2 for odd p; window 0 at p = 2.
    - Peak memory: floor((p+2)/2) activations, at most m. At small p that saves little: 3 of 4 at
      p = 4, 5 of 8 at p = 8.
    """
    p = num_ranks
    shift = 3 if p % 2 == 0 else 0
    block: dict[tuple[str, int], int] = {}
    for down, up in zip(range(p), reversed(range(p, 2 * p)), strict=True):
        block[F, down] = 2 * down
        block[F, up] = 3 * p - 2 - down
        block[B, up] = 3 * p - 1 + shift + 2 * down
        block[B, down] = 6 * p - 2 + shift - down
    return _controlled('v-half', p, num_microbatches, block, peak=(p + 2) // 2)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min: towards a third of 1F1B's memory, where F, B and W are equal.

    Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: a building block
    whose stages are 1 slot apart on the way down the V and on the way up.

        >>> print(grid(v_min(4, 4), width=76))
        rank 0   0F0  0F1  0F2  7F0  7B0  7W0  7F1  7B1  7W1  0B0  0F3  0W0  7F2…
        rank 1   1F0  1F1  6F0  6F1  6B0  6W0  1F2  1B0  6B1  1W0  6W1  6F2  1F3…
        rank 2   2F0  2F1  5F0  5F1  5B0  5W0  2F2  2B0  2W0  5B1  5F2  5W1  2B1…
        rank 3   3F0  4F0  3F1  4F1  4B0  3B0  4W0  3F2  3W0  4F2  4B1  3B1  4W1…

    The block, on rank r: F of chunk 0 in slot r, of chunk 1 in 2p-1-r; B of chunk 1 in 2p+r, of
    chunk 0 in 4p-1-r. An activation of chunk 0 lives for 4p-1-2r slots and one of chunk 1 for 2r+1:
    4p together on every rank, which with a microbatch every 6 slots is a third of 1F1B's. Modulo 6
    a rank's F of one chunk and B of the other are 2p apart, which is 0 where 3 divides p: then
    every B comes 2 slots later. All other pairs are an odd number apart.

    - Bubble where F=B=W, m >= 2p: at most (4p-7)/2 if 3 divides p, (4p-5)/2 otherwise.
    - Peak memory: floor((p+4)/3) activations, at most m: 2 of 4 at p = 4, 4 of 8 at p = 8.
    """
    p = num_ranks
    shift = 2 if p % 3 == 0 else 0
    block: dict[tuple[str, int], int] = {}
    for down, up in zip(range(p), reversed(range(p, 2 * p)), strict=True):
        block[F, down] = down
        block[F, up] = up
        block[B, up] = 2 * p + shift + down
        block[B, down] = 2 * p + shift + up
    return _controlled('v-min', p, num_microbatches, block, peak=(p + 4) // 3)


def _controlled(
    name: str, num_ranks: int, num_microbatches: int, block: dict[tuple[str, int], int], peak: int
) -> Schedule:
    """Return the block repeated, its ends tightened within the peak, and Ws put in the gaps."""
    placement = Placement.v(num_ranks)
    slots = with_weights(repeat(block, _INTERVAL, num_microbatches), placement)
    limit = 2 * peak  # in activations of one stage, two a rank
    drafts: list[Draft] = []
    # warm-up, and then the steady state, too, tightened with Ws in place, cool-down without
    for stop in (slots[Pass(B, 0, 0)], None):
        tight = tighten(slots, placement, limit, stop=stop)
        last = tight[Pass(F, 0, num_microbatches - 1)]
        bare = {p: slot for p, slot in tight.items() if p.kind != W}
        tight = tighten(bare, placement, limit, start=last + 1)
        lanes = [[order] for order in orders(tight, placement)]
        drafts.append(list_schedule(placement, num_microbatches, lanes, memory_limit=peak))
    return min(drafts, key=lambda draft: (draft.window, draft.makespan)).schedule(name)


def v_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B-V: 1F1B on a V placement, its stages' long and short activation lifetimes paired.

    Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, appendix: a building
    block without the B/W split.

        >>> print(grid(v_1f1b(3, 4), width=76))
        rank 0   0F0   0F1   0F2   0F3   5F0   5BW0  5F1   5BW1  5F2   5BW2  5F3…
        rank 1   1F0   1F1   1F2   4F0   1F3   4F1   4BW0  4F2   4BW1  1BW0  4F3…
        rank 2   2F0   3F0   2F1   3F1   2F2   3F2   3BW0  2BW0  2F3   3F3   3BW1…

    - Bubble where F=B=W, m >= 2p: (5p-5)/2 for p = 1 mod 3, else at most (5p-7)/2, 2 at p = 2
      (1F1B: 3p-3).
    - Peak memory: floor(2p/3)+1 activations, at most m. The claimed 2/3 of 1F1B's is approached as
      p grows and met nowhere: 3 of 4 at p = 4, 6 of 8 at p = 8, 11 of 16 at p = 16.
    """
    p = num_ranks
    placement = Placement.v(p)
    slots = repeat(_block(p), _INTERVAL, num_microbatches)
    slots = tighten(slots, placement, limit=2 * (2 * p // 3 + 1))
    return Schedule.of('1f1b-v', placement, num_microbatches, orders(slots, placement))


def _block(p: int) -> dict[tuple[str, int], int]:
    """Place forwards slot after slot, each backward as early as the interval has room for it."""
    block = {(F, stage): stage for stage in range(2 * p)}
    ready, other = 2 * p, {}
    for rank in range(p):
        # slots, modulo the interval, where both backwards fit around the forwards of the rank
        taken = {slot % _INTERVAL for slot in (rank, 2 * p - 1 - rank)}
        free = [a for a in range(_INTERVAL) if not taken & {a, (a + 1) % _INTERVAL}]
        places = next((a, b) for a in free for b in free if (b - a) % _INTERVAL in (2, 3))
        first, other[rank] = sorted(places, key=lambda place: (place - ready) % _INTERVAL)
        block[BW, 2 * p - 1 - rank] = ready + (first - ready) % _INTERVAL
        ready = block[BW, 2 * p - 1 - rank] + 2
    for rank in reversed(range(p)):
        block[BW, rank] = ready + (other[rank] - ready) % _INTERVAL
        ready = block[BW, rank] + 2
    return block


def joined(schedule: Schedule, pairs: Iterable[tuple[Pass, Pass]]) -> Schedule:
    """Return a schedule whose ranks run these pairs as one, where they follow each other."""
    cells = set(pairs)
    found = (
        (rank, at)
        for rank, order in enumerate(schedule.passes)
        for at, pair in enumerate(itertools.pairwise(order))
        if pair in cells
    )
    return replace(schedule, together=frozenset(found))


def dualpipe_v(num_ranks: int, num_microbatches: int, together: bool = False) -> Schedule:
    """DualPipeV: forwards and backwards of opposite directions paired, one direction per chunk.

    DeepSeek's DualPipe (DeepSeek-V3, arXiv 2412.19437) cut in half by Sea AI Lab: the same without
    a second copy of the weights. A pair is here F, then BW. With `together` it is one cell, which
    starts when both inputs are there: Megatron runs it at once where
    `overlap_moe_expert_parallel_comm` is set, to hide the experts' all-to-all. With m < 2p it is
    the order of 2p without the missing microbatches.

        >>> print(grid(dualpipe_v(2, 4), width=76))
        rank 0   0F0   0F1   0F2   3F0   3B0   3W0   3F1   0F3   3BW1  3F2   0BW0…
        rank 1   1F0   2F0   1F1   2F1   1F2   2BW0  2F2   1BW0  1F3   2BW1  2F3…

    - Bubble where F=B=W, m >= 2p: (p-1)/2, whatever m is. The published formula comes to p-1: that
      is what a pair costs that starts when both its inputs are there, which this F does not await.
    """
    p, m = num_ranks, num_microbatches
    whole = [_in_steps(p, max(m, 2 * p), rank) for rank in range(p)]
    orders = [first_microbatches(found, m) for found in whole]
    schedule = Schedule.of('dualpipe-v', Placement.v(p), m, orders)
    pairs = [
        (first, second)
        for phases_of_rank in whole
        for _, passes in phases_of_rank
        for first, second in itertools.pairwise(passes)
        if (first.kind, second.kind) == (F, BW)
    ]
    return joined(schedule, pairs) if together else schedule


def _in_steps(p: int, m: int, rank: int) -> list[Phase]:
    """Return one rank's order for m >= 2p, in the eight steps of DualPipe."""
    below = p - 1 - rank  # ranks further down the V
    last = ['1', '0'] * (rank + 1)  # the first half of these is fused, the second split
    fused = ' '.join(f'BW{chunk}' for chunk in last[: rank + 1])
    split = ' '.join(f'B{chunk}' for chunk in last[rank + 1 :])
    table = [
        (2 * below, 'F0', 'step 1: F0'),
        (rank + 1, 'F0 F1', 'step 2: F0 F1'),
        (below, 'B1 W F1', 'step 3: B1 W1 F1'),
        (m - 2 * p + rank + 1, 'F0 BW1 F1 BW0', 'step 4: F0 & BW1, F1 & BW0'),
        (below, 'BW1 F1 BW0', 'step 5: BW1, F1 & BW0'),
        (1, fused, 'step 6: whole backwards'),
        (1, split, 'step 6: B without W'),
        (below, 'W B0', 'step 7: W B0'),
        (2 * m, 'W', 'step 8: W left'),
    ]
    return phases([rank, 2 * p - 1 - rank], m, table)


_PAIRS = ' & '  # in labels of phases whose forwards run with the pass behind them


def stp(num_ranks: int, num_microbatches: int, together: bool = False) -> Schedule:
    """STP: while one pass of a pair waits for its all-reduce, the other computes.

    Synergistic tensor and pipeline parallelism, arXiv 2510.27257. Pairs are F & F, F & B and F & W;
    with `together` each is one cell. Where a W of the stage waits, a whole backward is B and that
    W: so weight gradients come in microbatch order. With m < 3p-1 it is the order of 3p-1 without
    the missing microbatches.

        >>> print(grid(stp(2, 5), width=76))
        rank 0   0F0   0F1   0F2   3F0   0F3   3F1   3B0   0F4   3W0   3F2   3BW1…
        rank 1   1F0   2F0   1F1   2F1   1F2   1F3   2F2   2BW0  1F4   1BW0  2F3…

    - Bubble where F=B=W, m >= 3p-1: F/2 in the windows; cells wait for both inputs: (p-1)F/2. The
      makespan is that of `zb-v` either way.
    - Peak memory: 2p - 1/2 activations, on the last rank; (3p+1)/2 on the first.
    """
    p, m = num_ranks, num_microbatches
    whole = [_stp_steps(p, max(m, 3 * p - 1), rank) for rank in range(p)]
    orders = [first_microbatches(found, m) for found in whole]
    schedule = Schedule.of('stp', Placement.v(p), m, orders)
    pairs: list[tuple[Pass, Pass]] = []
    for label, passes in itertools.chain.from_iterable(whole):
        coming = iter(passes if _PAIRS in label else ())
        pairs += [(p, next(coming)) for p in coming if p.kind == F]
    return joined(schedule, pairs) if together else schedule


def _stp_steps(p: int, m: int, rank: int) -> list[Phase]:
    """Return one rank's order for m >= 3p-1, in the nine steps of STP."""
    below, steady = p - 1 - rank, 2 * (m - 3 * p + 1) + 1 + 2 * rank
    kinds = ['BW'] * (steady - rank) + ['B'] * rank
    alternating = [f'F{1 - at % 2} {kind}{1 - at % 2}' for at, kind in enumerate(kinds)]
    table = [
        (2 * below, 'F0', 'step 1: F0'),
        (rank + 1, 'F0 F1', 'step 2: F0 F1'),
        ((rank + 1) % 2, 'F0', 'step 3: F0'),
        ((rank + 1) // 2, 'F0 F0', 'step 3: F0 & F0'),
        (below, 'F1 B1 F0 W1', 'step 4: F1 & B1, F0 & W1'),
        (1, ' '.join(alternating), 'step 5: F1 & BW1, F0 & BW0'),
        (2 * p - 2 - rank, 'B0 W0 F1 B1', 'step 6: B0 W0, F1 & B1'),
        (rank + 1, 'B0 W0 B1 W1', 'step 7: B0 W0 B1 W1'),
        (below, 'B0 W0 W1 W1', 'step 8: B0 W0 W1 W1'),
        (1, 'B0 W0', 'step 8: B0 W0'),
        (2 * m, 'W1 W0', 'step 9: W left'),
    ]
    return phases([rank, 2 * p - 1 - rank], m, table)
