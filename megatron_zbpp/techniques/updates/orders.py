"""WHEN: 1F1B without a flush, for so many calls that the last ones show how it goes on."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zbpp.ir import BW, F, Graph, Pass, Placement, Schedule
from megatron_zbpp.techniques.updates.graph import UPDATE


def num_calls(num_ranks: int, num_microbatches: int) -> int:
    """Return so many calls that three run all their forwards, however far a rank runs ahead."""
    return 2 * -(-(num_ranks - 1) // num_microbatches) + 3


def without_flush(name: str, graph: Graph, num_microbatches: int) -> Schedule:
    """Return 1F1B that goes on from batch to batch, with a step behind each (PipeDream).

    Rank s runs p-1-s forwards, and then forwards and backwards by turns (arXiv 1806.03377).

    Args:
        name: of the schedule.
        graph: of a stage a rank, that `updating` made.
        num_microbatches: of a batch, which is a call.
    """
    p, m = graph.num_stages, num_microbatches
    total = num_calls(p, m) * m
    orders = (_order(stage, p - 1 - stage, m, total) for stage in range(p))
    return Schedule.of(name, Placement.loop(p), total, orders, graph)


def _order(stage: int, ahead: int, m: int, total: int) -> Iterator[Pass]:
    yield from (Pass(F, stage, j) for j in range(ahead))
    for j in range(total):
        if j + ahead < total:
            yield Pass(F, stage, j + ahead)
        yield Pass(BW, stage, j)
        if (j + 1) % m == 0:
            yield Pass(UPDATE, stage, j)
