"""A technique of one's own: a pass N behind each F logs the norm of the stage's output.

`megatron_zbpp` knows nothing of it. WHAT and WHEN are here; `training` enters its face.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_zbpp.ir import F, Graph, Kind, Need, Pass, Schedule, Task
from megatron_zbpp.ir.techniques import made_of, register

N = 'N'


@register
def output_norms(graph: Graph) -> Graph:
    """Return the graph with an N behind each F, which nothing waits for."""
    forwards = [task for task in graph.needs if task.kind == F]
    needs = {task._replace(kind=N): (Need(task),) for task in forwards}
    holds = dict.fromkeys(needs, ())
    kinds = {N: Kind('norm of the output', usual=0.01)}
    return made_of(
        graph, 'output_norms', (), {**graph.needs, **needs}, {**graph.holds, **holds}, kinds
    )


def with_norms(schedule: Schedule) -> Schedule:
    """Return the schedule with N of each stage right behind its F."""

    def order(passes: tuple[Pass, ...]) -> Iterator[Pass]:
        for p in passes:
            yield p
            if Task(F, p.stage, p.slice) in schedule.graph.tasks(p.kind, p.stage, p.slice):
                yield p._replace(kind=N)

    orders = tuple(tuple(order(passes)) for passes in schedule.passes)
    graph, phases = output_norms(schedule.graph), ((),) * schedule.num_ranks
    return replace(schedule, graph=graph, passes=orders, together=frozenset(), phases=phases)


def training(log: list[tuple[Pass, float]]) -> None:
    """Enter the face, whose passes append to `log`: a run on one rank of a technique's schedule."""
    from megatron_zbpp.mcore import faces
    from megatron_zbpp.runtime.stage import Wrapper

    class NormWrapper(Wrapper):
        def __init__(self, stage: Any) -> None:
            super().__init__(stage)
            self.norms: dict[tuple, Any] = {}

        def step(self, forward, inner):
            output, num_tokens = inner(forward)
            if forward.p.kind == F:
                self.norms[forward.p[1:]] = output.detach().float().norm()
            return output, num_tokens

    class OutputNorms(faces.Face):
        nest = 70  # it sees the output that leaves the rank

        def begin(self, context):
            return NormWrapper

        def passes(self, stages, context):
            held = dict(zip(context.lowered.placement.stages(context.rank), stages, strict=True))

            def log_norm(p, inputs):
                log.append((p, held[p.stage].wrappers[self.name].norms.pop(p[1:]).item()))
                return {}

            return faces.Passes({N: log_norm})

    faces.register('output_norms', OutputNorms)
