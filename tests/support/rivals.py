"""Named schedules that a plan in slices must not be worse than."""

from collections.abc import Iterator, Sequence

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import find, names
from megatron_zbpp.techniques.slices.place import in_slices


def of_two_chunks(
    candidates: Sequence[tuple[Placement, Costs]], m: int, n: int, limit: float | None
) -> Iterator[tuple[str, float]]:
    """Yield name and makespan of those on one of these placements, within the limit of memory."""
    p = candidates[0][0].num_ranks
    for name in names(plain=True):
        if 2 not in find(name).chunks:
            continue
        made = in_slices(name, p, m, n, num_chunks=2)
        costs = dict(candidates).get(made.placement)
        if costs is not None and not (limit and max(peak(made, costs)) > limit + 1e-9):
            yield name, simulate(made, costs).makespan
