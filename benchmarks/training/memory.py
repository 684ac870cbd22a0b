"""The resident set of a rank in one iteration, and what its plan says: by what passes hold.

How much a pass of each stage and slice holds is told by the first microbatch; when it is held, and
how many at once, by the plan. Keys and values of slices are counted from the shape of the model.
Importing this imports Megatron.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks.copies.measure import anonymous_bytes
from megatron_zbpp.analysis.memory import live
from megatron_zbpp.ir import BW, F, Pass, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import KV, KV_GRADIENT
from megatron_zbpp.mcore.iteration import batch
from megatron_zbpp.mcore.lowered import for_megatron
from megatron_zbpp.runtime.clock import HostClock

Spans = Mapping[Pass, tuple[float, float]]
"""Bytes of a rank before and after each of its passes."""


class _Resident(HostClock):
    """Reads the resident set whenever the executor takes the time.

    What is free goes back first: `emulation.cpu` has malloc keep it, for speed.
    """

    def mark(self) -> float:
        ctypes.CDLL(None).malloc_trim(0)
        return float(anonymous_bytes())


def resident(runner: Any) -> Spans:
    """Run one iteration of ours; return bytes beside what there is before its first pass."""
    with mock.patch.object(batch, 'clock_for', lambda *_, **__: _Resident()):
        runner.iterate()
    record = runner.plugin.latest.record
    first = record.marks[0][0]
    return {
        p: (before - first, after - first)
        for p, (before, after) in zip(record.passes, record.marks, strict=True)
    }


def peaks(
    schedule: Schedule, ranks: Sequence[Spans], keys_and_values: float
) -> list[tuple[float, float]]:
    """Return most bytes of each rank, measured and planned.

    Args:
        schedule: that ran.
        ranks: what `resident` returned on each.
        keys_and_values: bytes of those of a microbatch on a full rank.
    """
    schedule = for_megatron(schedule)
    costs = _costs(schedule, {p: span for own in ranks for p, span in own.items()}, keys_and_values)
    measured = [max(after for _, after in own.values()) for own in ranks]
    return list(zip(measured, map(max, live(schedule, costs)), strict=True))


def _costs(schedule: Schedule, spans: Spans, keys_and_values: float) -> Costs:
    """Return what is held, by stage and slice; times do not matter."""
    slices, stages = schedule.graph.num_slices, range(schedule.num_stages)
    each = keys_and_values * schedule.num_ranks / len(stages) if slices > 1 else 0.0

    def grown(*kinds: str) -> list[list[float]]:
        """Return by stage and slice what passes of the first microbatch add; nothing is 1 byte."""
        return [
            [
                sum(b - a for kind in kinds for a, b in _of(spans, Pass(kind, stage, 0, part)))
                for part in range(slices)
            ]
            for stage in stages
        ]

    held = [[max(first - each, 1.0), *others] for first, *others in grown(F)]
    waiting = [[max(-amount, 1.0) for amount in own] for own in grown(W)]
    by_name = {'activation': held, 'retained': waiting if _splits(spans) else held}
    sums = {name: [sum(own) for own in amounts] for name, amounts in by_name.items()}
    parts = {
        name: [[amount / sum(own) for amount in own] for own in amounts]
        for name, amounts in by_name.items()
    }
    times, rows = [1.0] * len(stages), [each] * len(stages)
    kept = {KV: rows, KV_GRADIENT: rows}
    return Costs.of(times, times, times, amounts=kept, **sums).with_parts(**parts)


def _of(spans: Spans, p: Pass) -> list[tuple[float, float]]:
    return [spans[p]] if p in spans else []


def _splits(spans: Spans) -> bool:
    return not any(p.kind == BW for p in spans)
