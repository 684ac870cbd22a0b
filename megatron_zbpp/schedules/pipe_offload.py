"""PO: uniformly repeated building blocks of GIS-H, from which PipeOffload moves activations out."""

from __future__ import annotations

from math import gcd

from megatron_zbpp.ir import B, F, Placement, Schedule, Task, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules.construct.building_blocks import Slots, orders, repeat


def po(
    num_ranks: int, num_microbatches: int, num_chunks: int = 2, costs: Costs | None = None
) -> Schedule:
    """PO: the building block of GIS-H, once every 3v slots, and nothing moved up.

    Wan et al., PipeOffload, arXiv 2503.01328: chunk c of a rank lives a (v-c)-th of the
    time, so that what lives longest can go first.

        >>> print(grid(po(2, 4), width=76))
        rank 0   0F0  2F0  0F1  2B0  2W0  2F1  0B0  0W0  0F2  2B1  2W1  2F2  0B1…
        rank 1   1F0  3F0  3B0  3W0  1F1  1B0  1W0  3F1  3B1  3W1  1F2  1B1  1W1…

    - Peak memory: about (v+1)/(2v) of p activations.
    """
    placement = Placement.loop(num_ranks, num_chunks)
    ones = (1.0,) * placement.num_stages
    slots = _slots(placement, num_microbatches, costs or Costs.of(ones, ones, ones))
    return Schedule.of('po', placement, num_microbatches, orders(slots, placement))


def planned(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    """Return when passes of PO are planned: at slots as long as the longest of them."""
    slot = max(max(costs.times[kind]) for kind in (F, B, W))
    slots = _slots(schedule.placement, schedule.num_microbatches, costs)
    return [
        [(slot * slots[p], slot * slots[p] + costs.time(Task(p.kind, p.stage))) for p in order]
        for order in schedule.passes
    ]


def _slots(placement: Placement, num_microbatches: int, costs: Costs) -> Slots:
    return slots_of(placement, num_microbatches, _group(placement, costs))


def _group(placement: Placement, costs: Costs) -> int:
    """Return by how many microbatches chunks follow each other: half the ranks, or what feeds all.

    Where stages differ, so many that the slowest rank has work while all F, or all B, go round.
    """
    ranks = range(placement.num_ranks)

    def total(times: tuple[float, ...], rank: int) -> float:
        return sum(times[stage] for stage in placement.stages(rank))

    slowest = max(
        sum(total(times, rank) for times in (costs.times[F], costs.times[B], costs.times[W]))
        for rank in ranks
    )
    around = max(
        sum(total(times, rank) for rank in ranks) for times in (costs.times[F], costs.times[B])
    )
    group = (placement.num_ranks + 1) // 2
    while group < placement.num_ranks and slowest * group < around:
        group += 1
    return group


def slots_of(placement: Placement, num_microbatches: int, group: int) -> Slots:
    """Return the slot of each pass of PO, no two of a rank in one.

    A microbatch enters every 3v slots. Chunks whose slots would collide, where the group and v have
    a common factor, come a slot later each; and a rank later by as much as the next chunk's F on
    rank 0 can wait, so that its B does not.
    """
    d, v = placement.num_ranks, placement.num_chunks
    common = gcd(v, group)
    starts = [3 * (group * c + c * common // v) for c in range(v)]
    slack = min((starts[c] - starts[c - 1] - d for c in range(1, v)), default=d - 1)
    block: dict[tuple[str, int], int] = {}
    for stage, rank in enumerate(placement.only_route):
        chunk, late = stage // d, max(0, min(rank, slack))
        backward = starts[-1] + 3 * d - 2 * (rank + 1) + starts[v - 1 - chunk] + late
        block |= {
            (F, stage): starts[chunk] + rank + late,
            (B, stage): backward,
            (W, stage): backward + 1,
        }
    return repeat(block, 3 * v, num_microbatches)
