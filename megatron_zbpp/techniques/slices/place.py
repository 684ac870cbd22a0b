"""WHEN slices run: one rule for every family of schedules.

A *unit* is a slice of a microbatch. A family's order of m*n microbatches is one of m*n units: the
i-th forward of a stage is slice i % n of microbatch i // n, and its i-th backward is of the same
microbatch, last slice first. The first backwards then wait for more forwards than the family has
put before them. So on every rank all forwards come k places earlier: each takes the place, among
the other passes, of the k-th forward before it. k is the least with which the schedule runs: n-1
for 1F1B and ZB-H1 (Seq1F1B, arXiv 2406.03488, section 3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import B, F, Pass, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.grid import ScheduleError
from megatron_zbpp.schedules import build, find
from megatron_zbpp.techniques.slices.graph import sliced

_ROUNDING = 1e-9
_FORMS = {'zb-v': 'seq-zb-v', 'interleaved': 'seq1f1b-interleaved'}  # with orders of their own


def in_slices(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_slices: int,
    *,
    num_chunks: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    together: bool = False,
) -> Schedule:
    """Return the schedule of any family with each sequence cut into slices of equal times.

    One slice is the whole sequence, and the schedule `build`'s. Some families the rule orders
    badly: see `unsuited`.

    Args:
        name: of the family.
        num_ranks: p.
        num_microbatches: m.
        num_slices: n.
        num_chunks: as in `schedules.build`.
        costs: of whole sequences, but messages are of a slice.
        memory_limit: as in `schedules.build`; n-1 further forwards of slices are to fit, too.
        together: as in `schedules.build`, of whole sequences only.

    Raises:
        ValueError: as `schedules.build`; or the family has what cannot be cut.
    """
    family, n = find(name), num_slices
    if n < 1:
        raise ValueError(f'{n} slices: give at least 1')
    make = partial(build, num_ranks=num_ranks, num_chunks=num_chunks)
    whole = partial(make, num_microbatches=num_microbatches, costs=costs, memory_limit=memory_limit)
    if n == 1 and family.default_slices == 1:
        return whole(name, together=together)
    if together:
        raise ValueError(
            'passes of slices run one by one: leave --slices out, or --together and "together"'
        )
    form = name if 'num_slices' in family.options else _FORMS.get(family.name)
    if form is not None:  # these take no limit into account
        made = whole(form, num_slices=n)
    elif family.moves:
        raise ValueError(
            f'{family.name} moves activations, and slices are cut before those move: cut a '
            'schedule of F, B and W alone, such as 1f1b or po, then offload'
        )
    else:
        held = max(costs.amounts['activation']) if costs else 1.0
        units = make(
            name,
            num_microbatches=num_microbatches * n,
            costs=costs and _of_units(costs, n),
            memory_limit=None if memory_limit is None else n * memory_limit - (n - 1) * held,
        )
        made = by_rule(units, n)
    if family.default_slices > 1:
        return made
    return replace(made, name=f'{family.name} + slices {n}')


def by_rule(units: Schedule, slices: int) -> Schedule:
    """Return the order of m*n microbatches as that of m in n slices each: see the module's text."""
    if slices == 1:
        return units
    if not units.placement.is_one_way:
        raise ValueError(f'slices: {units.name} has two routes: take a schedule of one route')
    low = max(_least_shift(order, slices) for order in units.passes)
    failed, step = low - 1, 1
    while (made := _shifted(units, slices, low)) is None:
        failed, low, step = low, low + step, 2 * step
    while low - failed > 1:
        middle = (low + failed) // 2
        found = _shifted(units, slices, middle)
        failed, low, made = (middle, low, made) if found is None else (failed, middle, found)
    return made


def cut(units: Schedule, slices: int) -> Schedule:
    """Return the same passes in the same order, each of a slice instead of a microbatch."""
    if slices == 1:
        return units
    graph = sliced(units.graph, slices)

    def renamed(p: Pass) -> Pass:
        microbatch, part = divmod(p.microbatch, slices)
        if p.kind in graph.last_slice_first:
            part = slices - 1 - part
        return p._replace(microbatch=microbatch, slice=part)

    return replace(
        units,
        num_microbatches=units.num_microbatches // slices,
        passes=tuple(tuple(map(renamed, order)) for order in units.passes),
        graph=graph,
        together=frozenset(),
    )


def _shifted(units: Schedule, slices: int, shift: int) -> Schedule | None:
    """Return `units` cut, with all forwards `shift` places earlier; None: that would deadlock."""
    made = cut(with_forwards_earlier(units, shift), slices)
    try:
        simulate(made, Costs.uniform(made.placement))
    except ScheduleError:
        return None
    return made


def with_forwards_earlier(schedule: Schedule, shift: int) -> Schedule:
    """Return the schedule with all forwards `shift` places earlier among the other passes."""
    if not shift:
        return schedule
    passes = tuple(tuple(_earlier(order, shift)) for order in schedule.passes)
    return replace(schedule, passes=passes, phases=())


def _earlier(order: Sequence[Pass], shift: int) -> Iterator[Pass]:
    """Yield the order of a rank with each forward in the place of the one `shift` before it."""
    forwards = [p for p in order if p.kind == F]
    coming = iter(forwards)
    for _, p in zip(range(shift), coming):  # noqa: B905
        yield p
    for p in order:
        if p.kind != F:
            yield p
        elif (later := next(coming, None)) is not None:
            yield later


def _least_shift(order: Sequence[Pass], slices: int) -> int:
    """Return the least shift with which each backward of this rank has its own forward before."""
    counts: list[int] = []  # of each forward: the other passes before it
    places: dict[tuple[int, int], int] = {}  # of forwards, by stage and unit
    for at, p in enumerate(order):
        if p.kind == F:
            places[p.stage, p.microbatch] = len(counts)
            counts.append(at - len(counts))
    least, others = 0, 0
    for p in order:
        if p.kind == F:
            continue
        microbatch, part = divmod(p.microbatch, slices)
        own = places[p.stage, (microbatch + 1) * slices - 1 - part]
        least = max(least, own + 1 - bisect_right(counts, others))
        others += 1
    return least


def unsuited(made: Schedule, whole: Schedule) -> str | None:
    """Return why slices of this family do not pay, and what is better; None: they do.

    An n-th of the bubble should be left, where F = B = W; of some families it is twice that.

    Args:
        made: by `in_slices`.
        whole: the same family's schedule of whole sequences.
    """
    slices, costs = made.graph.num_slices, Costs.uniform(made.placement)
    left, before = (simulate(each, costs).makespan for each in (made, whole))
    work = sum(map(sum, (costs.times[kind] for kind in (F, B, W)))) / made.num_ranks
    left, before = (span - made.num_microbatches * work for span in (left, before))
    if left <= 2 / slices * before + _ROUNDING:
        return None
    return (
        f'{whole.name} does not suit slices: where F = B = W = 1 its bubble is {left:.4g} in '
        f'{slices} slices, and {before:.4g} without; of zb-v and zb-interleaved about an n-th is '
        f'left: take one of these, or zbpp plan --slices {slices}'
    )


def _of_units(costs: Costs, slices: int) -> Costs:
    return replace(
        costs,
        comm=slices * costs.comm,
        message=slices * costs.message,
        edges=tuple((*pair, slices * latency) for *pair, latency in costs.edges),
        hops=tuple((slices * there, slices * back) for there, back in costs.hops),
    )
