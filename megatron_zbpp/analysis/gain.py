"""Idle GPU time: what it costs against another schedule, its causes, the waits of each rank."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from operator import itemgetter
from typing import Any, NamedTuple

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Pass, Placement, Schedule
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
    sequences and keeps all activations. None: the stages do not become those of the family, or it
    takes no such number of microbatches.
    """
    p, m = schedule.num_ranks, schedule.num_microbatches
    alike = costs.joined(p * find(name).default_chunks)
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


class Step(NamedTuple):
    """One pass of a critical path, and what it waited for."""

    rank: int  # where it ran
    ran: Pass  # the pass
    start: float  # of the pass
    end: float  # of the pass
    # `start` for nothing, `rank` for the pass before it on its rank, `dependency` for a pass that
    # it needs, `communication` for a message that took `costs.edge`
    waited: str
    on: Pass | None  # that pass, which is the step before; None at the start


def critical_path(timeline: Timeline, costs: Costs) -> tuple[Step, ...]:
    """Return the passes that set the makespan, first to last, each with what it waited for.

    In a simulated timeline each step starts when the one before ends, plus `costs.travel` where it
    waited for communication. In a measured one, what gaps remain is time that costs do not explain.
    """
    schedule = timeline.schedule
    spans: dict[Pass, tuple[float, float]] = {}
    previous: dict[Pass, Pass] = {}
    for order, times in zip(schedule.passes, timeline.spans, strict=True):
        spans.update(zip(order, times, strict=True))
        previous.update(zip(order[1:], order[:-1], strict=True))
    ran = max(spans, key=lambda p: spans[p][1], default=None)
    steps: list[Step] = []
    while ran is not None:
        rank, before = schedule.rank_of(ran), previous.get(ran)
        causes = [(spans[before][1], 'rank', before)] if before else []
        for need, q in schedule.needs(ran):
            edge, ranks = 0.0, (schedule.rank_of(q), rank)
            if need.message:
                edge = costs.travel(schedule.graph, need.message, ranks, (q.stage, ran.stage))
            causes.append((spans[q][1] + edge, 'communication' if edge else 'dependency', q))
        # of equals the first: its own rank
        _, waited, on = max(causes, key=itemgetter(0), default=(0.0, 'start', None))
        steps.append(Step(rank, ran, *spans[ran], waited, on))
        ran = on
    return tuple(reversed(steps))


class Gap(NamedTuple):
    """A time in which a rank runs no pass."""

    rank: int  # that waits
    start: float  # of the gap, from the start of the batch
    length: float  # in the unit of the costs
    before: Pass | None  # the pass that ends at its start; None: the batch begins
    after: Pass | None  # the pass that starts at its end; None: the batch ends

    @property
    def where(self) -> str:
        """The part of the batch: 'start', 'inside' or 'end'."""
        return 'start' if self.before is None else 'end' if self.after is None else 'inside'


def gaps(timeline: Timeline, least: float = 0.0) -> list[Gap]:
    """Return the gaps of all ranks longer than `least`, each rank's in order of time."""
    spans = [span for own in timeline.spans for span in own]
    start, end = min(span[0] for span in spans), max(span[1] for span in spans)
    found: list[Gap] = []
    for rank, (order, own) in enumerate(zip(timeline.schedule.passes, timeline.spans, strict=True)):
        ran = sorted(zip(own, order, strict=True), key=lambda entry: entry[0])
        clock, before = start, None
        for (begin, done), p in ran:
            found.append(Gap(rank, clock - start, begin - clock, before, p))
            if done >= clock:
                clock, before = done, p
        found.append(Gap(rank, clock - start, end - clock, before, None))
    return [gap for gap in found if gap.length > max(least, 1e-9)]
