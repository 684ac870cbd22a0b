"""WHEN shards of the output layer run: one rule for every schedule of a plain pipeline.

S and T of a microbatch are put into the orders of a *host*, which stay as they are but for forwards
that come earlier, as those of slices do, so that the last stage has time between a forward and its
backward. Where they go, a *reference* tells: the host simulated with S and T as part of its passes,
a share of them in F and the rest in B. There S of a microbatch begins on all ranks at a share of
the time between that forward and that backward, T behind that backward by a share of the time of a
microbatch. Everything then runs in the order of those starts, so it cannot deadlock.

Of all shares that are tried the shortest schedule is taken; of equals that with the least memory,
and of those that in which the fewest logits wait for T: nobody needs to say what they take.
(Vocabulary Parallelism, arXiv 2411.05288, inserts whole periods into a building block by hand.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, product
from math import inf
from operator import itemgetter
from typing import NamedTuple

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import B, F, Pass, Placement, Schedule, Task, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.errors import ScheduleError
from megatron_zbpp.ir.graph import Graph
from megatron_zbpp.techniques.base import lack_of_times
from megatron_zbpp.techniques.composition import CLASHES, OVERLAP, VOCABULARY, require_goes_with
from megatron_zbpp.techniques.slices.place import with_forwards_earlier
from megatron_zbpp.techniques.vocabulary.graph import USUAL_SHARE, S, T, split_vocabulary

Entry = tuple[float, int, int, Pass]
"""A pass with its start, and what decides between passes of one start."""

_SHARES = 0.0, 0.5, 1.0
_DIGITS = 9


class _Reference(NamedTuple):
    """A host as if S and T were part of its passes: see the module's text.

    Attributes:
        host: its forwards come as early as they will.
        spans: of its passes.
        made: when the last stage's forwards end, by unit (microbatch and slice) in order.
        taken: when its backwards begin, by unit.
        longest: time of the longest S, by slice.
        period: time of a unit on a mean rank.
    """

    host: Schedule
    spans: Sequence[Sequence[tuple[float, float]]]
    made: Sequence[float]
    taken: Sequence[float]
    longest: list[float]
    period: float


def with_shard_times(costs: Costs, placement: Placement, share: float) -> Costs:
    """Return the costs with equal shards: S takes `share` of F and B of a mean rank, T of W.

    S is a forward, and the gradient of its input.

    Args:
        costs: of the stages, without an output layer.
        placement: of the stages.
        share: forward of a rank's shard, over that of its layers.

    Raises:
        ValueError: the costs have times of S or T.
    """
    p = placement.num_ranks
    for kind in (S, T):
        if kind in costs.times:
            raise ValueError(
                f'times of {kind} are in the file and follow from {share:g}, too: leave one out'
            )
    behind = (0.0,) * placement.num_stages
    forward, backward, weight = (share * sum(costs.times[kind]) / p for kind in (F, B, W))
    return costs.with_times(S=(*behind, *[forward + backward] * p), T=(*behind, *[weight] * p))


def with_shards(host: Schedule) -> Schedule:
    """Return `host` with the output layer on all ranks where nobody says what that costs."""
    uniform = Costs.uniform(host.placement)
    return in_shards(host, with_shard_times(uniform, host.placement, USUAL_SHARE))


def in_shards(
    host: Schedule,
    costs: Costs,
    memory_limit: float | None = None,
    on_time: Callable[[], bool] = lambda: True,
) -> Schedule:
    """Return the orders of `host` with the output layer on all ranks: S and T of Algorithm 2.

    At most one microbatch more is held on a rank than by the host.

    Args:
        host: a schedule of a plain pipeline.
        costs: of its stages, and behind them of the shards, S and T.
        memory_limit: most that a rank may hold.
        on_time: asked before each way, once one fits.

    Raises:
        ValueError: the host is of another kind, S and T have no times, or nothing fits the limit.
    """
    _require_plain(host)
    if lack := lack_of_times(costs, (S, T)):
        raise ValueError(lack)
    best: tuple[float, float, float] = (inf, inf, inf)
    found, least = None, inf
    for made in _ways(host, costs):
        if found is not None and not on_time():
            break
        try:
            makespan = round(simulate(made, costs).makespan, _DIGITS)
        except ScheduleError:
            continue  # of slices S may come too late
        if makespan > best[0]:
            continue
        held = max(peak(made, costs))
        least = min(least, held)
        own = makespan, held, _most_logits(made)
        if own < best and (memory_limit is None or held <= memory_limit):
            best, found = own, made
    if found is None:
        raise ValueError(
            f'memory limit {memory_limit:g}: {host.name} with the output layer on all ranks holds '
            f'at least {least:g}: raise the limit'
        )
    return found


def _most_logits(schedule: Schedule) -> int:
    """Return of how many units a rank has logits at most, whatever they take."""
    change = {S: 1, T: -1}
    orders = ([change.get(p.kind, 0) for p in order] for order in schedule.passes)
    return max(max(accumulate(order)) for order in orders)


def _require_plain(host: Schedule) -> None:
    """Raise ValueError unless S and T can be put into the orders of `host`."""
    require_goes_with(host, VOCABULARY)
    why = None
    if not host.placement.is_one_way:
        why = 'it has two routes'
    elif others := {each.name for each in host.graph.techniques} - {'sliced', 'exchanging_context'}:
        why = f'it has {min(others)} already'
    elif host.together:
        why = CLASHES[OVERLAP, VOCABULARY].reason
    elif all(p.kind == F for _, p in host):
        why = 'it has forwards only'
    if why is not None:
        raise ValueError(
            f'{host.name} cannot have the output layer on all ranks: {why}: take a schedule of F, '
            'B and W alone, such as 1f1b, zb-h1, zb-v, v-half or interleaved'
        )


def _ways(host: Schedule, costs: Costs) -> Iterator[Schedule]:
    """Yield the host with S and T in all ways that are tried."""
    for earlier in range(host.placement.num_chunks + 1):
        ahead = with_forwards_earlier(host, earlier)
        for share in _SHARES:
            reference = _reference(ahead, costs, share)
            if reference is None:
                break  # forwards cannot come so much earlier
            for logits, gradient in product(_SHARES, _SHARES):
                yield _placed(reference, logits, gradient)


def _reference(host: Schedule, costs: Costs, share: float) -> _Reference | None:
    """Simulate a host whose F take `share` of the time of S and T; None: it deadlocks."""
    n, placement = host.num_stages, host.placement
    shards = [s + t for s, t in zip(costs.times[S][n:], costs.times[T][n:], strict=True)]
    extra = [shards[rank] / placement.num_chunks for rank in placement.only_route]

    def longer(kind: str, part: float) -> tuple[float, ...]:
        own = zip(costs.times[kind], extra, strict=True)
        return tuple(time + part * more for time, more in own)

    whole = costs.with_times(F=longer(F, share), B=longer(B, 1 - share))
    try:
        spans = simulate(host, whole).spans
    except ScheduleError:
        return None
    last, back = placement.rank_of(n - 1, 0), host.graph.doers[B]
    slices = host.graph.num_slices
    made, taken = ([0.0] * host.num_microbatches * slices for _ in range(2))
    for q, (start, end) in zip(host.passes[last], spans[last], strict=True):
        if q.stage == n - 1 and q.kind == F:
            made[q.microbatch * slices + q.slice] = end
        elif q.stage == n - 1 and q.kind in back:
            taken[q.microbatch * slices + q.slice] = start
    period = sum(sum(whole.times[kind]) for kind in (F, B, W)) / host.num_ranks / slices
    longest = [
        max(costs.times[S][n:]) * costs.share(S, Task(S, n, part), slices) for part in range(slices)
    ]
    return _Reference(host, spans, made, taken, longest, period)


def _placed(reference: _Reference, logits: float, gradient: float) -> Schedule:
    """Return the host with S and T."""
    host, n = reference.host, reference.host.num_stages
    slices, made, taken = host.graph.num_slices, reference.made, reference.taken
    longest = reference.longest * host.num_microbatches
    apart = [
        max(0.0, end - begin - own) for begin, end, own in zip(made, taken, longest, strict=True)
    ]
    # of a microbatch the last slice, whose backward is the first, has the least time
    least = [min(apart[at - at % slices :][:slices]) for at in range(len(apart))]
    # both come first slice first, whichever backward is first
    begin_s = sorted(begin + logits * own for begin, own in zip(made, least, strict=True))
    begin_t = sorted(end + gradient * reference.period for end in taken)
    placed: list[list[Entry]] = []
    for rank, order in enumerate(host.passes):
        entries = [
            (span[0], 1, at, q)
            for at, (q, span) in enumerate(zip(order, reference.spans[rank], strict=True))
        ]
        for kind, turn, starts in ((S, 0, begin_s), (T, 2, begin_t)):
            for unit, start in enumerate(starts):
                microbatch, part = divmod(unit, slices)
                entries.append((start, turn, unit, Pass(kind, n + rank, microbatch, part)))
        placed.append(entries)
    graph = split_vocabulary(host.graph, host.num_ranks)
    return in_order(host, f'{host.name} + vocabulary', graph, placed)


def in_order(
    schedule: Schedule, name: str, graph: Graph, placed: Iterable[list[Entry]]
) -> Schedule:
    """Return a schedule whose ranks run passes by their starts.

    Args:
        schedule: that it is made from.
        name: of the new one.
        graph: of it.
        placed: the passes of each rank, in any order.
    """
    orders = (sorted(entries, key=itemgetter(0, 1, 2)) for entries in placed)
    passes = tuple(tuple(entry[-1] for entry in order) for order in orders)
    return replace(schedule, name=name, passes=passes, graph=graph, phases=())
