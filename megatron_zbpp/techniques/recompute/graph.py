"""WHAT recomputation makes of a graph: R, a forward again, before B."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_zbpp.ir.graph import DEVICE, B, F, Graph, Hold, Kind, R, Task
from megatron_zbpp.ir.techniques import instead, known_stages, made_of


def recompute(graph: Graph, stages: Iterable[int]) -> Graph:
    """Make forwards of `stages` keep their input only; R makes the activation again, before B.

    (Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; per stage as in
    GPipe, arXiv 1811.06965, section 2.3.)
    """
    stages = known_stages(graph, stages)
    needs, holds = dict(graph.needs), dict(graph.holds)
    for task in [t for t in graph.needs if t.kind == F and t.stage in stages]:
        again, backward = task._replace(kind=R), task._replace(kind=B)
        # its own forward, or what brings back what that has left
        (kept,) = (n for n in needs[backward] if n.task.stage == task.stage and n.task.kind != B)
        needs[again] = (kept,)
        needs[backward] = instead(needs[backward], kept.task, again)
        if again in graph.needs:
            raise ValueError(f'stage {task.stage} is recomputed already: name it once')
        holds[again] = (Hold(DEVICE, 'input', -1), Hold(DEVICE, 'activation', 1))
        for other in _between(graph, task, kept.task):
            holds[other] = tuple(
                hold._replace(amount='input') if hold.amount == 'activation' else hold
                for hold in graph.holds[other]
            )
    return made_of(
        graph, 'recompute', (stages,), needs, holds, {R: Kind('recomputation', in_order=False)}
    )


def _between(graph: Graph, first: Task, last: Task) -> Iterator[Task]:
    yield last
    if last != first:
        yield from _between(graph, first, graph.needs[last][0].task)
