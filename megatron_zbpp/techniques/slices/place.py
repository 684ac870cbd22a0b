"""WHEN slices run: one rule for every family of schedules.

A *unit* is a slice of a microbatch. A family's order of m*n microbatches is one of m*n units: the
i-th forward of a stage is slice i % n of microbatch i // n, and its i-th backward is of the same
microbatch, last slice first. The first backwards then wait for more forwards than the family has
put before them. So on every rank all forwards come k places earlier: each takes the place, among
the other passes, of the k-th forward before it. k is the least with which the schedule runs: n-1
for 1F1B and ZB-H1 (Seq1F1B, arXiv 2406.03488, section 3).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import B, F, Pass, Placement, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.schedule import ScheduleError
from megatron_zbpp.schedules import build, find
from megatron_zbpp.schedules.construct.phases import even_groups
from megatron_zbpp.schedules.loops import in_groups
from megatron_zbpp.schedules.whole_backwards import one_f_one_b
from megatron_zbpp.schedules.zero_bubble import closed_form, filled, zb_h1
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
    badly: see `unsuited`. Costs are of whole sequences, but messages are of a slice; n-1 further
    forwards of slices are to fit the limit, too.
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
    elif family.asynchronous:
        raise ValueError(
            f'slices: {family.name} steps after so many whole microbatches: take a synchronous '
            'schedule, such as zb-v'
        )
    else:
        held = max(costs.amounts['activation']) if costs else 1.0
        of_units = costs and replace(
            costs,
            comm=n * costs.comm,
            message=n * costs.message,
            edges=tuple((*pair, n * latency) for *pair, latency in costs.edges),
            hops=tuple((n * there, n * back) for there, back in costs.hops),
        )
        units = make(
            name,
            num_microbatches=num_microbatches * n,
            costs=of_units,
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
    passes: list[tuple[Pass, ...]] = []
    for order in schedule.passes:  # each forward in the place of the one `shift` before it
        forwards = [p for p in order if p.kind == F]
        coming, earlier = iter(forwards[shift:]), forwards[:shift]
        for p in order:
            earlier += [p] if p.kind != F else itertools.islice(coming, 1)
        passes.append(tuple(earlier))
    return replace(schedule, passes=tuple(passes), phases=())


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


SLICES = 4  # where the caller names no number


def seq1f1b(num_ranks: int, num_microbatches: int, num_slices: int = SLICES) -> Schedule:
    """Seq1F1B: 1F1B whose unit is a slice of a sequence; backwards take the last slice first.

    Sun et al., Seq1F1B, arXiv 2406.03488. A slice attends to the slices before it, whose keys and
    values are kept; so the first backward waits for n-1 further forwards. The same as `1f1b` with
    `--slices n`.

        >>> print(grid(seq1f1b(2, 2, num_slices=2), width=90))
        rank 0   0F0     0F0.1   0F1     0BW0.1  0F1.1   0BW0    0BW1.1  0BW1
        rank 1   1F0     1F0.1   1BW0.1  1F1     1BW0    1F1.1   1BW1.1  1BW1

    - Bubble: (p-1)(F+B+W)/n, where slices take equal times.
    - Peak memory: (p+n-1)/n activations on rank 0, beside keys and values.
    """
    units = one_f_one_b(num_ranks, num_microbatches * num_slices)
    return replace(by_rule(units, num_slices), name='seq1f1b')


def seq1f1b_zb(num_ranks: int, num_microbatches: int, num_slices: int = SLICES) -> Schedule:
    """Seq1F1B-ZB: ZB-H1 whose unit is a slice of a sequence; backwards take the last slice first.

    Sun et al., Seq1F1B, arXiv 2406.03488, with the order of Qi et al., arXiv 2401.10241. The same
    as `zb-h1` with `--slices n`.

        >>> print(grid(seq1f1b_zb(2, 2, num_slices=2), width=90))
        rank 0   0F0    0F0.1  0F1    0B0.1  0W0.1  0F1.1  0B0    0W0    0B1.1  0W1.1  0B1…
        rank 1   1F0    1F0.1  1B0.1  1F1    1B0    1W0.1  1F1.1  1B1.1  1W0    1B1    1W1.1…

    - Bubble: (p-1)(F+B-W)/n for mn >= 2p-2+n, where slices take equal times.
    - Peak memory: (p+n-1)/n activations on every rank, beside keys and values.
    """
    units = zb_h1(num_ranks, num_microbatches * num_slices)
    return replace(by_rule(units, num_slices), name='seq1f1b-zb')


def seq_zb_v(num_ranks: int, num_microbatches: int, num_slices: int = SLICES) -> Schedule:
    """Seq-ZB-V: ZB-V whose unit is a slice of a sequence; backwards take the last slice first.

    ZB-V's closed form (Qi et al., arXiv 2401.10241, section 6) with n-1 further forwards of both
    chunks before the first backward (Sun et al., Seq1F1B, arXiv 2406.03488). Below 2p-2+n units
    Ws come wherever a rank would wait, as in ZB-V below 2p-1 microbatches. The same as `zb-v` with
    `--slices n`.

        >>> print(grid(seq_zb_v(2, 2, num_slices=2), width=76))
        rank 0   0F0    0F0.1  0F1    3F0    0F1.1  3F0.1  3B0.1  3W0.1  3F1…
        rank 1   1F0    2F0    1F0.1  2F0.1  1F1    2F1    2B0.1  2W0.1  1F1.1…

    - Bubble where F=B=W: 0 within each rank's window for mn >= 2p-2+n; makespan (p-1)/(2n) longer.
    - Peak memory: (p+n-1)/n activations on every rank, beside keys and values.
    """
    p, n, units = num_ranks, num_slices, num_microbatches * num_slices
    orders = (closed_form(p, units, rank, ahead=n - 1) for rank in range(p))
    schedule = cut(Schedule.of('seq-zb-v', Placement.v(p), units, orders), n)
    return schedule if units >= 2 * p - 2 + n else filled(schedule, memory_limit=(p + n - 1) / n)


def seq1f1b_interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int = 2, num_slices: int = SLICES
) -> Schedule:
    """Seq1F1B-I: interleaved 1F1B whose unit is a slice of a sequence.

    Sun et al., Seq1F1B, arXiv 2406.03488; with n >= p the order that SlimPipe (arXiv 2504.14519)
    describes. Units go chunk by chunk in groups of whole microbatches, of p units or more: so no
    n deadlocks, whether it divides p or not. The same as `interleaved` with `--slices n`.

        >>> print(grid(seq1f1b_interleaved(2, 2, num_slices=2), width=76))
        rank 0   0F0     0F0.1   2F0     2F0.1   0F1     0F1.1   2BW0.1  2F1…
        rank 1   1F0     1F0.1   3F0     3F0.1   3BW0.1  1F1     3BW0    1F1.1…

    - Bubble: (p-1)(F+B+W)/(nv) for mn >= p, where slices take equal times.
    - Peak memory: ((v-1)g + n + 2(p-1))/(nv) activations on rank 0 for groups of up to g units,
      beside keys and values: 1 + 2(p-1)/(nv) for n >= p.
    """
    sizes = even_groups(num_microbatches, -(-num_ranks // num_slices))
    units = in_groups(num_ranks, num_chunks, [num_slices * size for size in sizes])
    return replace(by_rule(units, num_slices), name='seq1f1b-interleaved')
