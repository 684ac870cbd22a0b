"""List scheduling: a rank that is free starts the first pass in its lanes that is ready."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import product

from megatron_zbpp.ir import F, Graph, Pass, Placement, chain
from megatron_zbpp.schedules.construct.draft import Draft

Lane = Iterable[Pass]


def list_schedule(
    placement: Placement,
    num_microbatches: int,
    lanes: Sequence[Sequence[Lane]],
    memory_limit: float = math.inf,
    graph: Graph | None = None,
) -> Draft:
    """Run the lanes against the clock, each F, B and W of a stage taking the same time.

    A lane is a queue: only its first pass may start. A rank takes from the first of its lanes whose
    first pass has its inputs and, if it is a forward, fits the memory; else the oldest W whose B is
    done; else it waits. So one lane is a fixed order with Ws in its gaps, and a lane for each stage
    and kind is an order of preference. In the latter a forward leaves room for one activation of
    each later chunk of its rank, without which two ranks could each wait for the other's memory.

    Args:
        placement: which rank holds which stage.
        num_microbatches: m.
        lanes: per rank, its lanes of F, B and BW, the most preferred first. Ws come by themselves.
        memory_limit: most that a rank may hold, in activations of one microbatch on a full rank.
        graph: of F, B and W, whose sequences may be sliced; default: of a plain pipeline.

    Raises:
        ValueError: the lanes cannot be run to their end within the memory limit.
    """
    draft = Draft(placement, num_microbatches, graph=graph)
    queues = [[*map(deque, of_rank), draft.pending[rank]] for rank, of_rank in enumerate(lanes)]
    needs = _needs(draft, lanes)
    receivers = _receivers(placement)
    wakes = [(0.0, rank) for rank in range(placement.num_ranks)]
    while wakes:
        now, rank = heappop(wakes)
        if draft.clock[rank] > now:
            continue  # busy: it wakes again at the end of its pass
        p = _next(draft, queues[rank], now, needs, memory_limit)
        if p is not None:
            end = draft.put(p, not_before=now)
            heappush(wakes, (end, rank))
            for neighbour in receivers[p.kind, p.stage]:
                heappush(wakes, (end + draft.costs.edge(rank, neighbour), neighbour))
    if any(queue for of_rank in queues for queue in of_rank):
        raise ValueError(f'memory_limit {memory_limit} is too small: no rank can go on; raise it')
    return draft


def _needs(draft: Draft, lanes: Sequence[Sequence[Lane]]) -> list[float]:
    """Return, per stage, the room that its forward must find: its own; of several lanes, more."""
    placement, slices = draft.placement, draft.graph.num_slices
    activation = [held / slices for held in draft.costs.amounts['activation']]
    return [
        sum(activation[other] for other in placement.stages(rank) if other >= stage)
        if len(lanes[rank]) > 1
        else activation[stage]
        for stage, rank in enumerate(placement.only_route)
    ]


def _next(
    draft: Draft, queues: Sequence[deque[Pass]], now: float, needs: list[float], limit: float
) -> Pass | None:
    *lanes, pending = queues
    for lane in lanes:
        if not lane or draft.arrival(lane[0]) > now:
            continue
        if lane[0].kind != F or draft.has_room(lane[0].stage, needs[lane[0].stage], limit):
            return lane.popleft()
    return pending[0] if pending else None


def _receivers(placement: Placement) -> dict[tuple[str, int], set[int]]:
    """Return by kind and stage of a pass other ranks that may have waited for it."""
    graph, ranks = chain(placement.num_stages), placement.only_route
    found: dict[tuple[str, int], set[int]] = {}
    for kind, stage in product(graph.kinds, range(placement.num_stages)):
        fed = (taker for task in graph.tasks(kind, stage) for taker, _ in graph.feeds[task])
        found[kind, stage] = {ranks[taker.stage] for taker in fed} - {ranks[stage]}
    return found
