"""WHEN shards of the word embedding run: one rule for every schedule with S and T.

That schedule is simulated. I of a microbatch comes where the first stage begins the forward of the
one two before, D of the one three before, J where the B of the next one ends, behind T. So each
collective has a microbatch's time and more, and costs its latency at an end of an iteration only.
All else stays, and everything runs in the order of those starts, so it cannot deadlock.
"""

from __future__ import annotations

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import B, F, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.composition import EMBEDDING, require_goes_with
from megatron_zbpp.techniques.vocabulary.graph import LOOKUP, READ, SCATTER, T, split_embedding
from megatron_zbpp.techniques.vocabulary.place import USUAL_SHARE, Entry, in_order, with_shard_times

_AHEAD = 2  # microbatches; of one, with chunks, some forwards of the first stage would wait


def with_embedding(schedule: Schedule) -> Schedule:
    """Return a schedule with S and T that has the embedding on all ranks, of usual costs."""
    uniform = Costs.uniform(schedule.placement)
    costs = with_shard_times(uniform, schedule.placement, USUAL_SHARE)
    return in_embedding_shards(schedule, costs)


def in_embedding_shards(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the orders of a schedule with S and T, with D, I and J in them.

    Args:
        schedule: with the output layer on all ranks.
        costs: of its stages and shards; D, I and J take no time unless they have some.

    Raises:
        ValueError: it has what this does not go with.
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
