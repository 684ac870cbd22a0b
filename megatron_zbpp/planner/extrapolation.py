"""From the orders of a few microbatches to those of many: their steady state, repeated.

Whatever holds each queue of a rank equally often can be run once more: memory is back where it was
and queues stay in step. If that is done on all ranks at about the same time, the orders grow by
whole microbatches, and where the few have settled into a rhythm, each costs one beat of it.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf

from megatron_zbpp.planner.annealing import Solution
from megatron_zbpp.planner.budget import OnTime, always
from megatron_zbpp.planner.ends import replay
from megatron_zbpp.planner.problem import Ends, Orders, Problem

_BEATS = (1, 2)  # microbatches in one repetition
_PLACES = range(10, 95, 3)  # where to repeat, in percent of the time


def extrapolate(
    few: Problem, orders: Orders, many: Problem, on_time: OnTime = always
) -> Solution | None:
    """Return the best orders of `many` that repeat a part of `orders`; None if none can be.

    Args:
        few: what `orders` are for.
        orders: of few microbatches.
        many: the same question of more microbatches.
        on_time: asked before each part that is tried.
    """
    added = many.num_microbatches - few.num_microbatches
    result = replay(few, orders)
    best = None
    for beat in _BEATS:
        if result is None or added % beat:
            continue
        for cut in _cuts(few, orders, result[1], beat):
            if not on_time():
                return best
            longer = [
                order[:at] + order[at : at + len(queues) * beat] * (added // beat) + order[at:]
                for at, order, queues in zip(cut, orders, few.queues, strict=True)
            ]
            extended = replay(many, longer, cap=inf if best is None else best.value)
            if extended is not None and (best is None or extended[0] < best.value):
                best = Solution(extended[0], longer)
    return best


def _cuts(problem: Problem, orders: Orders, ends: Ends, beat: int) -> list[tuple[int, ...]]:
    """Yield, per rank, where a repeatable part starts: all at about one time, for many times."""
    balanced = [
        _balanced(order, len(queues), beat)
        for order, queues in zip(orders, problem.queues, strict=True)
    ]
    if not all(balanced):
        return []
    times = [sorted(end for queue in queues for end in ends[queue]) for queues in problem.queues]
    last = max(own[-1] for own in times)
    cuts = {
        tuple(
            _nearest(starts, bisect_left(own, last * percent / 100))
            for starts, own in zip(balanced, times, strict=True)
        ): None
        for percent in _PLACES
    }
    return list(cuts)


def _balanced(order: list[int], num_queues: int, beat: int) -> list[int]:
    """Return where the next `num_queues * beat` passes are `beat` of each queue."""
    length = num_queues * beat
    counts = dict.fromkeys(order, 0)
    exact = 0
    starts: list[int] = []
    for position, queue in enumerate(order):
        exact += (counts[queue] + 1 == beat) - (counts[queue] == beat)
        counts[queue] += 1
        if position >= length:
            gone = order[position - length]
            exact += (counts[gone] - 1 == beat) - (counts[gone] == beat)
            counts[gone] -= 1
        if position >= length - 1 and exact == num_queues:
            starts.append(position - length + 1)
    return starts


def _nearest(starts: list[int], position: int) -> int:
    at = bisect_left(starts, position)
    return min(starts[max(at - 1, 0) : at + 1], key=lambda start: abs(start - position))
