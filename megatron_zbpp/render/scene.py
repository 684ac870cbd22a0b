"""What every picture of a timeline shows: bars in colours, held activations, ticks."""

from __future__ import annotations

from math import floor, log10
from typing import NamedTuple

from megatron_zbpp.ir import F, Pass
from megatron_zbpp.planning.costs import Costs
from megatron_zbpp.planning.memory import live
from megatron_zbpp.planning.timeline import Timeline
from megatron_zbpp.render.colours import colour


class Bar(NamedTuple):
    """One pass as a picture shows it; times count from the timeline's first start."""

    ran: Pass
    start: float
    end: float
    fill: str


def bars(timeline: Timeline) -> list[list[Bar]]:
    """The bars of each rank, in time order."""
    placement = timeline.schedule.placement
    origin = min((spans[0][0] for spans in timeline.spans if spans), default=0.0)
    fills = {
        (kind, stage): colour(kind, chunk, placement.num_chunks)
        for kind in ('F', 'B', 'W', 'BW')
        for stage, chunk in enumerate(placement.chunks)
    }
    return [
        [
            Bar(p, start - origin, end - origin, fills[p.kind, p.stage])
            for p, (start, end) in zip(order, spans, strict=True)
        ]
        for order, spans in zip(timeline.schedule.passes, timeline.spans, strict=True)
    ]


def held(timeline: Timeline, costs: Costs) -> list[list[tuple[float, float]]]:
    """Per rank the steps of its memory curve: (time, activations held from then on).

    An F takes its memory when it starts; the others release theirs when they end.
    """
    slack = 1e-9 * timeline.makespan
    amounts = live(timeline.schedule, costs)
    return [_steps(row, after, slack) for row, after in zip(bars(timeline), amounts, strict=True)]


def _steps(row: list[Bar], after: tuple[float, ...], slack: float) -> list[tuple[float, float]]:
    """A step within `slack` of the one before replaces it: memory released and taken at once."""
    steps: list[tuple[float, float]] = []
    for bar, amount in zip(row, after, strict=True):
        time = bar.start if bar.ran.kind == F else bar.end
        if steps and time - steps[-1][0] <= slack:
            time = steps.pop()[0]
        steps.append((time, amount))
    return steps


def ticks(span: float, most: int) -> list[float]:
    """At most about `most` round numbers from 0 to `span`."""
    if span <= 0:
        return [0.0]
    rough = span / max(most, 1)
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(span / step * (1 + 1e-9)) + 1)]


def number(value: float, digits: int = 5) -> str:
    """`value` for people: at most `digits` significant digits, no trailing zeros, no exponent."""
    text = f'{value:.{digits}g}'
    return f'{float(text):.0f}' if 'e+' in text else text
