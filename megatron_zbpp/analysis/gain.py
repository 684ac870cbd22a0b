"""Gain of a schedule over another one, and the causes of its idle GPU time."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from typing import Any, NamedTuple

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.schedules import build, find

RIVAL = '1f1b'  # what gains are told against, where nothing else is asked for


class Idle(NamedTuple):
    """Shares of all ranks' time, first start to last end, in which no pass computes."""

    schedule: float  # even the busiest rank waits, for no message
    uneven_stages: float  # other ranks have less to do than the busiest
    messages: float  # more, as messages take time


def idle_parts(timeline: Timeline, costs: Costs) -> Idle:
    """Divide `idle_all_ranks` of a timeline by its causes; `costs` are those of its simulation."""
    span, ranks = timeline.makespan, timeline.schedule.num_ranks
    if not span:
        return Idle(0.0, 0.0, 0.0)
    busy = [timeline.busy(rank) for rank in range(ranks)]
    times: dict[str, Any] = {'comm': 0.0, 'message': 0.0, 'edges': (), 'hops': ()}
    at_once = replace(costs, **times, collectives=dict.fromkeys(costs.collectives, 0.0))
    silent = span if at_once == costs else simulate(timeline.schedule, at_once).makespan
    most = max(busy)
    return Idle((silent - most) / span, most / span - fsum(busy) / ranks / span, 1 - silent / span)


def makespan_of(name: str, schedule: Schedule, costs: Costs) -> float | None:
    """Return the makespan of family `name` for the model, ranks and microbatches of `schedule`.

    Stages are joined, or cut into equal parts, as the family has other chunks. It runs on whole
    sequences and keeps all activations.

    Returns:
        None: the stages do not become those of the family, or it takes no such number of
        microbatches.
    """
    from megatron_zbpp.ir.plan_costs import joined  # which no run without a comparison needs

    p, m = schedule.num_ranks, schedule.num_microbatches
    alike = joined(costs, p * find(name).default_chunks)
    if costs.num_stages != schedule.num_stages or alike is None:
        return None
    try:
        rival = build(name, p, m)
    except ValueError:
        return None
    return simulate(rival, alike).makespan


def megatron_refuses(placement: Placement, num_microbatches: int) -> str:
    """Return the reason why Megatron's interleaved schedule has no such order; empty: it has."""
    p, m = placement.num_ranks, num_microbatches
    if not placement.is_loop or placement.num_chunks == 1 or m % p == 0:
        return ''
    return (
        f"{m} microbatches are no multiple of {p} ranks: Megatron's own interleaved schedule "
        'refuses them, so that there is no run of it to compare with'
    )


def gain_of(taken: float, rival: float | None) -> float | None:
    """Return the share of the rival's time that is saved; None without a rival."""
    return 1 - taken / rival if rival else None


def gain_text(makespan: float, rival: float | None, name: str) -> str:
    """Return how much less or more time than `name` that is; empty where it has none.

    >>> gain_text(24.0, 32.0, '1f1b')
    ', 25.0% less time than 1f1b'
    """
    share = gain_of(makespan, rival)
    if share is None:
        return ''
    return f', {abs(share):.1%} {"less" if share >= 0 else "more"} time than {name}'
