"""Costs as they were measured."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from megatron_zbpp.ir import BW, B, F, W
from megatron_zbpp.planning.costs import Costs
from megatron_zbpp.planning.timeline import Timeline


def fit(timeline: Timeline, comm: float = 0.0) -> Costs:
    """Costs whose times are the medians of what `timeline` measured on each stage.

    A fused BW counts as B with a W that takes no time. Activations are those of `Costs.uniform`.

    Args:
        timeline: measured; every stage ran each of its kinds at least once.
        comm: latency of an edge between ranks, in the timeline's unit.
    """
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    schedule = timeline.schedule
    for order, spans in zip(schedule.passes, timeline.spans, strict=True):
        for p, (start, end) in zip(order, spans, strict=True):
            taken[B if p.kind == BW else p.kind, p.stage].append(end - start)
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
