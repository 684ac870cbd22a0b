"""Costs as they were measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from megatron_zbpp.ir import B, F, Placement, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline


def fit(timeline: Timeline, comm: float = 0.0) -> Costs:
    """Return costs whose times are the medians of what `timeline` measured on each stage.

    A pass of several tasks counts as the first of them, the others take no time. Activations are
    those of `Costs.uniform`.

    Args:
        timeline: measured; every stage ran each of its kinds at least once.
        comm: latency of an edge between ranks, in the timeline's unit.
    """
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    schedule = timeline.schedule
    for order, spans in zip(schedule.passes, timeline.spans, strict=True):
        for p, (start, end) in zip(order, spans, strict=True):
            first, *_ = schedule.graph.tasks(p.kind, p.stage)
            taken[first.kind, p.stage].append(end - start)
    forward, backward, weight = (
        tuple(median(taken.get((kind, s), [0.0])) for s in range(schedule.num_stages))
        for kind in (F, B, W)
    )
    uniform = Costs.uniform(schedule.placement)
    return Costs(
        forward,
        backward,
        weight,
        comm,
        activation=uniform.activation,
        retained=uniform.retained,
    )


def lags(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Return the shortest time from the end of a pass to the start of what needs it.

    By (rank of the pass, other rank). Below 0 only where their clocks differ.
    """
    schedule = timeline.schedule
    spans = {
        p: span
        for order, own in zip(schedule.passes, timeline.spans, strict=True)
        for p, span in zip(order, own, strict=True)
    }
    shortest: dict[tuple[int, int], float] = {}
    for p, (start, _) in spans.items():
        for q in schedule.predecessors(p):
            pair = schedule.rank_of(q), schedule.rank_of(p)
            if pair[0] != pair[1]:
                lag = start - spans[q][1]
                shortest[pair] = min(lag, shortest.get(pair, lag))
    return shortest


def latency(timeline: Timeline) -> float:
    """Time from the end of a pass to the start of what needs it on another rank, as measured.

    The shortest that was seen between two ranks, both ways taken together, so that clocks which
    differ do not matter; the median over the neighbours.
    """
    shortest = lags(timeline)
    both = [(lag + shortest[b, a]) / 2 for (a, b), lag in shortest.items() if a < b]
    return max(0.0, median(both)) if both else 0.0


def middle(found: Sequence[Costs]) -> Costs:
    """Return costs whose times are the medians of several measurements of the same stages."""
    forward, backward, weight = (
        tuple(map(median, zip(*(getattr(costs, name) for costs in found), strict=True)))
        for name in ('forward', 'backward', 'weight')
    )
    first = found[0]
    return Costs(
        forward,
        backward,
        weight,
        median(costs.comm for costs in found),
        activation=first.activation,
        retained=first.retained,
    )


def full_rank(placement: Placement, held: Mapping[int, tuple[float, float]]) -> float | None:
    """Return bytes of a microbatch's activation on the fullest rank; None if a stage is unknown.

    Args:
        placement: of the stages.
        held: by stage: bytes held from F to B, and from B to W.
    """
    if set(held) != set(range(placement.num_stages)):
        return None
    ranks = range(placement.num_ranks)
    return max(sum(held[stage][0] for stage in placement.stages(rank)) for rank in ranks) or None


def with_bytes(costs: Costs, full: float, held: Mapping[int, tuple[float, float]]) -> Costs:
    """`costs` with what stages hold as measured, in activations of which one has `full` bytes."""
    pairs = [held[stage] for stage in range(costs.num_stages)]
    return replace(
        costs,
        activation=tuple(left / full for left, _ in pairs),
        retained=tuple(waiting / full for _, waiting in pairs),
    )
