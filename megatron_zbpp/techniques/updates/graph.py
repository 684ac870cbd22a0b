"""WHAT updates of the weights within an iteration make of a graph."""

from __future__ import annotations

from megatron_zbpp.ir.graph import Graph, Kind, Need, Task, W
from megatron_zbpp.ir.techniques import made_of


def updating(graph: Graph, every: int = 1, everywhere: bool = False) -> Graph:
    """Return the graph where U steps a stage's weights after each `every` microbatches' last W.

    The version of the weights that a pass sees (`analysis.weight_versions`) is the number of U
    before it on its stage. On two routes one of two copies would be stepped: `check` refuses that.

    Args:
        graph: any.
        every: microbatches a step.
        everywhere: whether a step needs the gradients of all stages (a synchronous step, with its
            norm), or of its own only.
    """
    if every < 1:
        raise ValueError(f'a step every {every} microbatches: give at least 1')
    needs, holds = dict(graph.needs), dict(graph.holds)
    weights = [task for task in graph.needs if task.kind == W]
    for stage in range(graph.num_stages):
        awaited = weights if everywhere else [task for task in weights if task.stage == stage]
        message = 'norm' if everywhere else None
        needs[Task('U', stage)] = tuple(
            Need(task, message if task.stage != stage else None) for task in awaited
        )
        holds[Task('U', stage)] = ()
    kinds = {'U': Kind('update of the weights', every=every, of_weights=True)}
    return made_of(graph, 'updating', (every, everywhere), needs, holds, kinds)
