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
from megatron_zbpp.ir.graph import Graph
from megatron_zbpp.ir.schedule import ScheduleError
from megatron_zbpp.schedules import build, find
from megatron_zbpp.techniques.base import lack_of_times
from megatron_zbpp.techniques.composition import (
    CLASHES,
    EMBEDDING,
    OVERLAP,
    VOCABULARY,
    require_goes_with,
    techniques_of,
)
from megatron_zbpp.techniques.slices.place import SLICES, seq1f1b_interleaved, with_forwards_earlier
from megatron_zbpp.techniques.vocabulary.graph import (
    LOOKUP,
    READ,
    SCATTER,
    USUAL_SHARE,
    S,
    T,
    split_embedding,
    split_vocabulary,
)

Entry = tuple[float, int, int, Pass]
"""A pass with its start, and what decides between passes of one start."""

_SHARES = 0.0, 0.5, 1.0
_DIGITS = 9


class _Reference(NamedTuple):
    """A host as if S and T were part of its passes: see the module's text."""

    host: Schedule  # its forwards come as early as they will
    spans: Sequence[Sequence[tuple[float, float]]]  # of its passes
    # when the last stage's forwards end, by unit (microbatch and slice) in order
    made: Sequence[float]
    taken: Sequence[float]  # when its backwards begin, by unit
    longest: list[float]  # time of the longest S, by slice
    period: float  # time of a unit on a mean rank


def with_shard_times(costs: Costs, placement: Placement, share: float) -> Costs:
    """Return the costs with equal shards: S takes `share` of F and B of a mean rank, T of W.

    S is a forward, and the gradient of its input. `share` is the forward of a shard over that of
    the layers of a rank.
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

    At most one microbatch more is held on a rank than by the host. `on_time` is asked before each
    way, once one fits.
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
        # of how many units a rank has logits at most, whatever they take
        logits = [[(p.kind == S) - (p.kind == T) for p in order] for order in made.passes]
        own = makespan, held, max(max(accumulate(order)) for order in logits)
        if own < best and (memory_limit is None or held <= memory_limit):
            best, found = own, made
    if found is None:
        raise ValueError(
            f'memory limit {memory_limit:g}: {host.name} with the output layer on all ranks holds '
            f'at least {least:g}: raise the limit'
        )
    return found


def _require_plain(host: Schedule) -> None:
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
    """Return a schedule whose ranks run passes by their starts."""
    orders = (sorted(entries, key=itemgetter(0, 1, 2)) for entries in placed)
    passes = tuple(tuple(entry[-1] for entry in order) for order in orders)
    return replace(schedule, name=name, passes=passes, graph=graph, phases=())


_AHEAD = 2  # microbatches; of one, with chunks, some forwards of the first stage would wait


def with_embedding(schedule: Schedule) -> Schedule:
    """Return a schedule with S and T that has the embedding on all ranks, of usual costs."""
    uniform = Costs.uniform(schedule.placement)
    costs = with_shard_times(uniform, schedule.placement, USUAL_SHARE)
    return in_embedding_shards(schedule, costs)


def in_embedding_shards(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the orders of a schedule with S and T, with D, I and J in them.

    D, I and J take no time unless the costs have some.
    """
    require_goes_with(schedule, EMBEDDING)
    n, spans = schedule.num_stages, simulate(schedule, costs).spans
    first = schedule.placement.rank_of(0, 0)
    own = list(zip(schedule.passes[first], spans[first], strict=True))
    forwards = [(start, q) for q, (start, _) in own if q.stage == 0 and q.kind == F]
    doers = schedule.graph.doers[B]
    backwards = [(end, q) for q, (_, end) in own if q.stage == 0 and q.kind in doers]
    starts = [-1.0] * (_AHEAD + 1) + [start for start, _ in forwards]
    placed: list[list[Entry]] = []
    for rank, order in enumerate(schedule.passes):
        entries = [
            (span[0], 2, at, q) for at, (q, span) in enumerate(zip(order, spans[rank], strict=True))
        ]
        behind_t = {(q.microbatch, q.slice): entry[0] for *entry, q in entries if q.kind == T}
        for turn, (_, q) in enumerate(forwards):
            read, start = starts[turn : turn + 2]
            if rank == first:
                entries.append((read, 0, turn, q._replace(kind=READ)))
            entries.append((start, 1, turn, q._replace(kind=LOOKUP, stage=n + rank)))
        latest = 0.0
        for turn, (_, q) in enumerate(backwards):
            end, _ = backwards[min(turn + 1, len(backwards) - 1)]
            latest = max(latest, end, behind_t[q.microbatch, q.slice])
            entries.append((latest, 3, turn, q._replace(kind=SCATTER, stage=n + rank)))
        placed.append(entries)
    graph = split_embedding(schedule.graph, schedule.num_ranks)
    return in_order(schedule, f'{schedule.name} and embedding', graph, placed)


WHOLE = ' with the whole output layer on its last rank'
"""Behind the name of a schedule that shards are compared with."""


def has_shards(schedule: Schedule) -> bool:
    """Check that the output layer is on all ranks."""
    return any(each.name == split_vocabulary.__name__ for each in schedule.graph.techniques)


def with_usual_share(schedule: Schedule, costs: Costs) -> Costs:
    """Return costs with times of shards: those that orders are made for where nobody says them."""
    if not has_shards(schedule) or S in costs.times or T in costs.times:
        return costs
    return with_shard_times(costs, schedule.placement, USUAL_SHARE)


def with_whole_layer(costs: Costs) -> Costs:
    """Return costs whose last stage takes the times of all shards, too: S is half F and half B."""
    if lack := lack_of_times(costs, (S, T)):
        raise ValueError(lack)
    logits, weight = (sum(costs.times[kind][costs.num_stages :]) for kind in (S, T))
    more = {F: logits / 2, B: logits / 2, W: weight}
    times = {kind: own for kind, own in costs.times.items() if kind not in (S, T)}
    for kind, each in more.items():
        times[kind] = (*times[kind][:-1], times[kind][-1] + each)
    return replace(costs, times=times)


def rival_costs(schedule: Schedule, costs: Costs) -> Costs:
    """Return the costs of a schedule without shards that `schedule` is compared with."""
    timed = has_shards(schedule) and {S, T} <= costs.times.keys()
    return with_whole_layer(costs) if timed else costs


HOSTS = '1f1b', 'zb-h1', 'zb-v', 'v-half', 'v-min', 'interleaved', 'zb-interleaved'


def hosts_of(chunks: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Yield hosts with each of these numbers of chunks per rank that they can have."""
    return ((name, k) for name, k in product(HOSTS, chunks) if k in find(name).chunks)


def hosts_like(
    schedule: Schedule, costs: Costs, memory_limit: float | None = None
) -> Iterator[Schedule]:
    """Yield what hosts on the placement of `schedule` come to with the shards that it has.

    Left out is what cannot be built for so many microbatches, or holds more.
    """
    placement, m = schedule.placement, schedule.num_microbatches
    both = EMBEDDING in techniques_of(schedule)
    for name, chunks in hosts_of([placement.num_chunks]):
        try:
            host = build(name, placement.num_ranks, m, num_chunks=chunks)
            if host.placement != placement:
                continue
            made = in_shards(host, costs, memory_limit)
        except ValueError:  # another host may do
            continue
        yield in_embedding_shards(made, costs) if both else made


def slimpipe(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    costs: Costs | None = None,
    num_slices: int = SLICES,
) -> Schedule:
    """SlimPipe: interleaved 1F1B whose unit is an equal slice, with shards of the output layer.

    Li et al., SlimPipe, arXiv 2504.14519. S and T are of a slice, too, as in Vocabulary Parallelism
    (arXiv 2411.05288). The paper's n is a multiple of p: then a group of n units is one microbatch.

        >>> print(grid(slimpipe(2, 2, num_slices=2), width=76))
        rank 0   0F0     0F0.1   2F0     2F0.1   4S0     0F1     4S0.1   0F1.1…
        rank 1   1F0     1F0.1   3F0     5S0     3F0.1   5S0.1   1F1     3BW0.1…

    - Bubble: at most (p-1)(F+B+W)/(nv) for mn >= p and B+W = 2F, where slices take equal times;
      attention makes later ones longer, which context exchange evens out (simulated only).
    - Peak memory: at most 1 + (2p-2+v)/(nv) activations for n >= p, beside keys, values and logits.
    """
    host = seq1f1b_interleaved(num_ranks, num_microbatches, num_chunks, num_slices)
    known = costs is not None and {S, T} <= costs.times.keys()
    made = in_shards(host, costs) if known and costs is not None else with_shards(host)
    return replace(made, name='slimpipe')
