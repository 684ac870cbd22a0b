"""Lower bounds: what no schedule on a placement can beat, and hence how good a plan is.

For each queue, all its passes after the first can start. For each rank r, from its own passes and
the time that others need at least:

- Idle at the start. Until the first B can reach r, at the earliest at b_r, r has only forwards to
  do, and no more of them than its memory holds (App. B of arXiv 2401.10241 has this for the first
  stage): it idles for b_r less the longest forwards that fit.
- Idle at the end. When r's last F ends, the last microbatch still has to go forward through the
  later stages, back through all, and through a W. Meanwhile r has only the backwards to do whose
  activations it holds by then, and idles for the rest.
- The two do not overlap unless all forwards fit into memory at once.
- Memory-time. An activation is held at least from its F until its microbatch has been to the last
  stage and back. All of these together fit into limit x time.

Together they are exact for many instances, ZB-V and V-Half at F = B = W among them. They are blind
to how passes of different ranks must fit together, so under tight limits with unequal times the
optimum lies above; on small instances `exact` closes that gap.

Of graphs with other passes than F, B and W, and of slices that differ, they say the first, and that
a rank does all its work.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from megatron_zbpp.planner.problem import Problem


def lower_bound(problem: Problem) -> float:
    """Return a value that no orders within the limits can be below."""
    ranks = range(problem.placement.num_ranks)
    queues = max(_queue_bound(problem, queue) for queue in range(problem.num_queues))
    if not (problem.is_plain and problem.even):
        ends = map(sum, zip(problem.firsts, problem.work, strict=True))
        return max(queues, *(a - b for a, b in zip(ends, problem.origins, strict=True)))
    works = max(_work_bound(problem, rank) for rank in ranks)
    return max(queues, works, *(_memory_bound(problem, rank) for rank in ranks))


def _queue_bound(problem: Problem, queue: int) -> float:
    """Return the time of all passes of a queue, from when the first can start."""
    work = problem.num_microbatches * problem.durations[queue]
    return problem.arrivals[queue] + work - problem.origins[problem.ranks[queue]]


def _work_bound(problem: Problem, rank: int) -> float:
    m, times = problem.num_microbatches, problem.durations
    first, work, cap = problem.firsts[rank], problem.work[rank], problem.caps[rank]
    f, b, w = _of_rank(problem, rank)
    held = [problem.changes[queue] for queue in f]
    forwards = [times[queue] for queue in f]
    backwards = [times[backward] + times[weight] for backward, weight in zip(b, w, strict=True)]
    weights = [times[queue] for queue in w]
    kept = [-problem.changes[queue] for queue in w]

    first_backward = problem.arrivals[b[-1]]
    idle = max(first, first_backward - _most(forwards, held, m, cap))
    own_end = work + idle - problem.origins[rank]
    before_last_forward = idle if m * sum(held) > cap else first
    left = _most(backwards + weights, held + kept, m, cap)
    left = min(left, m * sum(backwards))
    return max(own_end, before_last_forward + work - left + _rest(problem, f[-1]))


def _of_rank(problem: Problem, rank: int) -> Iterator[list[int]]:
    """Yield the queues of F, of B and of W on a rank, by stage."""
    stages = problem.placement.stages(rank)
    return ([queues[stage] for stage in stages] for queues in problem.by_stage)


def _rest(problem: Problem, forward: int) -> float:
    """Return the time from the end of a microbatch's F to its latest end, origins taken off."""
    done = problem.arrivals[forward] + problem.durations[forward]
    ends = (
        problem.arrivals[sink] + problem.durations[sink] - problem.origins[problem.ranks[sink]]
        for sink in problem.sinks
    )
    return max(ends) - done


def _most(times: list[float], amounts: list[int], m: int, cap: float) -> float:
    """Return the longest time of passes that `cap` holds: up to m of each, a fractional fill."""
    if len(set(amounts)) == 1 and amounts[0] and cap < inf:
        cap -= cap % amounts[0]
    total = 0.0
    kinds = sorted(zip(times, amounts, strict=True), key=lambda kind: _density(*kind), reverse=True)
    for time, amount in kinds:
        taken = min(m, cap / amount) if amount else m
        total += taken * time
        cap -= taken * amount
    return total


def _density(time: float, amount: int) -> float:
    return time / amount if amount else inf


def _memory_bound(problem: Problem, rank: int) -> float:
    cap = problem.caps[rank]
    if cap in (0, inf):
        return 0.0
    total = 0.0
    forwards, _, weights = _of_rank(problem, rank)
    for forward, weight in zip(forwards, weights, strict=True):
        there = problem.arrivals[weight] - problem.arrivals[forward]  # W may start where B ends
        kept = -problem.changes[weight]
        total += problem.changes[forward] * there + kept * problem.durations[weight]
    held_for = total * problem.num_microbatches / cap
    return held_for + problem.firsts[rank] - problem.origins[rank]
