"""When each pass runs if every rank keeps to its order and starts as early as it may.

A microbatch makes one chain: F of stage 0, 1, ..., S-1, then B (or BW) of stage S-1, ..., 1, 0.
Whatever a pass needs beyond its predecessor in the chain (B needs its own F) came earlier in the
same chain, so one number per pass, the end of that predecessor, decides when it may start. Link k
of the chain is row k of one flat list of ends, m entries a row; row 0 is the input, there from the
start, and the last row takes the ends of W, for which nobody waits.
"""

from __future__ import annotations

from megatron_zbpp.ir import BW, B, F, Pass, Schedule, W, predecessors
from megatron_zbpp.planning.costs import Costs
from megatron_zbpp.planning.errors import ScheduleError
from megatron_zbpp.planning.timeline import Timeline

_PENDING = -1.0

# Per kind and stage: where the row of what it needs starts, where its own, edge and pass time.
_Links = dict[str, list[tuple[int, int, float, float]]]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs each rank's order as early as its dependencies allow.

    An F or B edge between ranks takes `costs.edge`, which occupies no device; between stages on
    one rank it takes nothing. Linear in the number of passes.

    Args:
        schedule: one that `check` accepts; otherwise only deadlock is noticed.
        costs: of its stages.

    Raises:
        ScheduleError: no rank can go on; it names each one's next pass and what that waits for.
        ValueError: `costs` has another number of stages.
    """
    costs.require(schedule.placement)
    spans = _run(schedule, _links(schedule, costs))
    if any(len(done) < len(order) for done, order in zip(spans, schedule.passes, strict=True)):
        raise _stuck(schedule, list(map(len, spans)))
    return Timeline(schedule, tuple(map(tuple, spans)))


def _links(schedule: Schedule, costs: Costs) -> _Links:
    """Where in the chain each stage's passes are, and what they take."""
    ranks, m = schedule.placement.ranks, schedule.num_microbatches
    count = len(ranks)
    links: _Links = {F: [], B: [], BW: [], W: []}
    for stage, rank in enumerate(ranks):
        before = costs.edge if stage and ranks[stage - 1] != rank else 0.0
        after = costs.edge if stage < count - 1 and ranks[stage + 1] != rank else 0.0
        row = 2 * count - stage  # of B and BW
        links[F].append((stage * m, (stage + 1) * m, before, costs.time(F, stage)))
        links[B].append(((row - 1) * m, row * m, after, costs.time(B, stage)))
        links[BW].append(((row - 1) * m, row * m, after, costs.time(BW, stage)))
        links[W].append((row * m, (2 * count + 1) * m, 0.0, costs.time(W, stage)))
    return links


def _run(schedule: Schedule, links: _Links) -> list[list[tuple[float, float]]]:
    """Spans of all passes that can run, per rank."""
    m = schedule.num_microbatches
    ends = [0.0] * m + [_PENDING] * (m * (2 * schedule.num_stages + 1))
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule.passes]
    waiting: dict[int, int] = {}  # entry of `ends` -> the rank that waits for it
    ready = list(range(len(spans)))
    while ready:
        rank = ready.pop()
        order, done = schedule.passes[rank], spans[rank]
        now = done[-1][1] if done else 0.0
        for i in range(len(done), len(order)):
            kind, stage, microbatch = order[i]
            need, own, edge, duration = links[kind][stage]
            end = ends[need + microbatch]
            if end == _PENDING:
                waiting[need + microbatch] = rank
                break
            start = max(now, end + edge)
            now = start + duration
            done.append((start, now))
            ends[own + microbatch] = now
            if own + microbatch in waiting:
                ready.append(waiting.pop(own + microbatch))
    return spans


def _stuck(schedule: Schedule, cursors: list[int]) -> ScheduleError:
    """The error for ranks that cannot run the pass at their cursor; a cycle among them first."""
    waits = {
        rank: _wait(schedule, rank, order[at])
        for rank, (order, at) in enumerate(zip(schedule.passes, cursors, strict=True))
        if at < len(order)
    }
    cycle = _cycle({rank: holder for rank, (holder, _) in waits.items()})
    others = [rank for rank in waits if rank not in cycle]
    parts = [
        title + '; '.join(waits[rank][1] for rank in ranks)
        for title, ranks in (('a cycle: ', cycle), ('stuck: ', others))
        if ranks
    ]
    what = f'deadlock, {"; ".join(parts)}: move an awaited pass to before the one that waits'
    return ScheduleError(what, schedule, [(rank, cursors[rank]) for rank in waits])


def _wait(schedule: Schedule, rank: int, p: Pass) -> tuple[int, str]:
    """Which rank must act before `rank` can run `p`, and a sentence that says so."""
    names = before(p, schedule.num_stages)
    holder = schedule.placement.ranks[names[0].stage]
    awaited = next((q for q in schedule.passes[holder] if q in names), None)
    if awaited is None:
        return holder, f'rank {rank} at {p} waits for {names[0]}, which rank {holder} never runs'
    return holder, f'rank {rank} at {p} waits for {awaited}, still to come on rank {holder}'


def _cycle(waits_for: dict[int, int]) -> list[int]:
    """Ranks that wait for each other in a circle; [] if one waits for a rank that is not stuck."""
    path: list[int] = []
    rank = next(iter(waits_for))
    while rank in waits_for and rank not in path:
        path.append(rank)
        rank = waits_for[rank]
    return path[path.index(rank) :] if rank in path else []


def before(p: Pass, num_stages: int) -> tuple[Pass, ...]:
    """The link before `p` in its chain, under each name it may have; () for the first F."""
    splits = (predecessors(p, num_stages, split) for split in (True, False))
    return tuple(passes[-1] for passes in splits if passes)
