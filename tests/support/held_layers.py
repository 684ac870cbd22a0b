"""How many decoder layers each of Megatron's ranks holds by a plan's file."""

from megatron_zbpp import load
from megatron_zbpp.ir.formats import load_plan


def layers_of_ranks(path) -> list[int]:
    """By rank; the loss is on the last one, or Megatron has the ranks in reverse."""
    placement = load(path).placement
    if placement.only_route[-1] != placement.num_ranks - 1:
        placement = placement.reversed()
    stages = load_plan(path).layout.split('|')
    return [
        sum(stages[stage].count('t') for stage in placement.stages(rank))
        for rank in range(placement.num_ranks)
    ]
