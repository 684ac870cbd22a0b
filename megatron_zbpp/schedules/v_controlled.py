"""V-Half and V-Min: a half and a third of 1F1B's memory, on a V placement."""

from __future__ import annotations

from megatron_zbpp.ir import B, F, Pass, Placement, Schedule
from megatron_zbpp.schedules.construct.building_blocks import (
    Slots,
    orders,
    repeat,
    tighten,
    with_weights,
    without_weights,
)
from megatron_zbpp.schedules.construct.draft import Draft
from megatron_zbpp.schedules.construct.list_scheduling import dispatch
from megatron_zbpp.schedules.family import TWO, Family

_INTERVAL = 6  # slots from one microbatch to the next: F, B and W of two chunks


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: half of 1F1B's memory for half of its bubble.

    Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: a building block
    whose stages are 2 slots apart on the way down the V and 1 on the way up.

    - Bubble where F=B=W, m >= 2p: (3p-7)/2 for even p >= 4, (3p-4)/2 for odd p; window 0 at p = 2.
    - Peak memory: floor((p+2)/2) activations, at most m. At small p that saves little: 3 of 4 at
      p = 4, 5 of 8 at p = 8.
    - When: memory is short and m is large. F, B and W that differ cost it little: the bubble still
      vanishes with m. Twice the messages of 1F1B.
    """
    p = num_ranks
    shift = 3 if p % 2 == 0 else 0
    block = {}
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

    - Bubble where F=B=W, m >= 2p: at most (4p-7)/2 if 3 divides p, (4p-5)/2 otherwise.
    - Peak memory: floor((p+4)/3) activations, at most m: 2 of 4 at p = 4, 4 of 8 at p = 8.
    - When: F, B and W take the same time, or nothing else fits. Where they differ, which is the
      normal case, every microbatch adds some bubble and it does not vanish with m: at p = 8, m = 64
      and 1/1.2/0.8 it is .21 of the makespan, and 1F1B's .10 ("comparable throughput" in the paper
      means that). `v-half` does not have this flaw. Twice the messages of 1F1B.
    """
    p = num_ranks
    shift = 2 if p % 3 == 0 else 0
    block = {}
    for down, up in zip(range(p), reversed(range(p, 2 * p)), strict=True):
        block[F, down] = down
        block[F, up] = up
        block[B, up] = 2 * p + shift + down
        block[B, down] = 2 * p + shift + up
    return _controlled('v-min', p, num_microbatches, block, peak=(p + 4) // 3)


def _controlled(
    name: str, num_ranks: int, num_microbatches: int, block: dict[tuple[str, int], int], peak: int
) -> Schedule:
    """The block repeated, its ends tightened within the peak, and Ws put in the gaps.

    Tightening the steady state too is mostly better and seldom worse: the better of both.
    """
    placement = Placement.v(num_ranks)
    slots = with_weights(repeat(block, _INTERVAL, num_microbatches), placement)
    drafts = [_draft(placement, slots, num_microbatches, peak, steady) for steady in (False, True)]
    return min(drafts, key=lambda draft: (draft.window, draft.makespan)).schedule(name)


def _draft(
    placement: Placement, slots: Slots, num_microbatches: int, peak: int, steady: bool
) -> Draft:
    """Warm-up (and, if so said, steady state) tightened with Ws in place, cool-down without."""
    limit = 2 * peak  # in activations of one stage, two a rank
    stop = None if steady else slots[Pass(B, 0, 0)]
    slots = tighten(slots, placement, limit, stop=stop)
    last = slots[Pass(F, 0, num_microbatches - 1)]
    slots = tighten(without_weights(slots), placement, limit, start=last + 1)
    lanes = [[order] for order in orders(slots, placement)]
    return dispatch(placement, num_microbatches, lanes, memory_limit=peak)


FAMILIES = (
    Family(
        name='v-half',
        generate=v_half,
        summary='half the bubble and about half the memory of 1F1B, on a V placement',
        bubble='(3p-7)/2 even p, (3p-4)/2 odd p (F=B=W=1)',
        memory='floor((p+2)/2)',
        source='Controllable Memory, arXiv 2405.15362',
        aliases=('half',),
        chunks=TWO,
        default_chunks=2,
        min_ranks=2,
    ),
    Family(
        name='v-min',
        generate=v_min,
        summary='a third of the memory of 1F1B, on a V placement; poor where F, B, W differ',
        bubble='at most (4p-5)/2 (F=B=W=1)',
        memory='floor((p+4)/3)',
        source='Controllable Memory, arXiv 2405.15362',
        aliases=('min',),
        chunks=TWO,
        default_chunks=2,
        min_ranks=2,
    ),
)
