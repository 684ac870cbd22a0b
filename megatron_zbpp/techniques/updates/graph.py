"""WHAT updates of the weights within an iteration make of a graph."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zbpp.ir.graph import F, Graph, Kind, Need, Task, W
from megatron_zbpp.ir.techniques import made_of

UPDATE, NORM = 'U', 'norm'
STASHED, NEWEST, CORRECTED = 'stashed', 'newest', 'corrected'


def updating(
    graph: Graph,
    every: int = 1,
    everywhere: bool = False,
    delays: Sequence[int] = (),
    backward: str = STASHED,
) -> Graph:
    """Return the graph where U steps a stage's weights after each `every` microbatches' last W.

    The version of the weights that a forward sees (`weight_versions`) is the number of U
    before it on its stage, or what `delays` say. On two routes one of two copies would be stepped:
    `check` refuses that.

    Args:
        graph: any.
        every: microbatches a step.
        everywhere: whether a step needs the gradients of all stages (a synchronous step, with its
            norm), or of its own only.
        delays: by stage, how many steps old the weights are that a forward sees; none: the newest.
        backward: the weights of a backward: `stashed`, those of its forward; `newest`; or
            `corrected`, an estimate of its forward's from the newest (PipeMare's T2).
    """
    if every < 1:
        raise ValueError(f'a step every {every} microbatches: give at least 1')
    if delays and (len(delays) != graph.num_stages or min(delays) < 0):
        raise ValueError(
            f'delays {", ".join(map(str, delays))} of {graph.num_stages} stages: give one of each '
            'stage, from 0 up'
        )
    if backward not in (STASHED, NEWEST, CORRECTED):
        raise ValueError(
            f'a backward with weights {backward!r}: give {STASHED}, {NEWEST} or {CORRECTED}'
        )
    needs, holds = dict(graph.needs), dict(graph.holds)
    weights = [task for task in graph.needs if task.kind == W]
    for stage in range(graph.num_stages):
        awaited = weights if everywhere else [task for task in weights if task.stage == stage]
        message = NORM if everywhere else None
        needs[Task(UPDATE, stage)] = tuple(
            Need(task, message if task.stage != stage else None) for task in awaited
        )
        holds[Task(UPDATE, stage)] = ()
    for task in graph.needs if delays else ():
        if task.kind == F:
            seen = Need(Task(UPDATE, task.stage), back=(delays[task.stage] + 1) * every)
            needs[task] = (*needs[task], seen)
    kinds = {UPDATE: Kind('update of the weights', every=every, of_weights=True)}
    more = (tuple(delays), backward) if delays or backward != STASHED else ()
    return made_of(graph, 'updating', (every, everywhere, *more), needs, holds, kinds)
