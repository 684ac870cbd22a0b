"""WHAT shards of the output layer on all ranks make of a graph."""

from __future__ import annotations

from megatron_zbpp.ir.graph import (
    BROADCAST,
    DEVICE,
    GATHER,
    REDUCE,
    B,
    Collective,
    F,
    Graph,
    Hold,
    Kind,
    Need,
    Task,
)
from megatron_zbpp.ir.techniques import made_of

S, T = 'S', 'T'
HIDDEN, STATISTICS, GRADIENT = 'hidden', 'statistics', 'vocabulary'
"""Messages: the output of the last layer; maxima, sums and logits of the targets, from which each
rank has the loss; the gradient of the output of the last layer."""


def split_vocabulary(graph: Graph, ranks: int, barriers: int = 1) -> Graph:
    """Return the graph with a shard of the output layer a rank: S its logits, T its gradient.

    (Vocabulary Parallelism, arXiv 2411.05288.) The last stage's B waits for S on all ranks, where
    there is one barrier (algorithm 2), or for T on all ranks, where there are two (algorithm 1).
    The three messages are collectives: one broadcast, one gather, and one reduction.

    From S to T each rank holds its 'logits', and the broadcast 'hidden' states. With one barrier S
    makes its part of the gradient, too: 'gradient_part', which needs the statistics to be reduced.

    Args:
        graph: any without shards.
        ranks: of the pipeline; the shard of rank r counts as stage S + r.
        barriers: 1 or 2.
    """
    if barriers not in (1, 2):
        raise ValueError(f'{barriers} barriers: give 1 (algorithm 2) or 2 (algorithm 1)')
    needs, holds = dict(graph.needs), dict(graph.holds)
    held = 'logits', HIDDEN, *(('gradient_part',) if barriers == 1 else ())
    last = [t for t in graph.needs if t.kind == F and t.stage == graph.num_stages - 1]
    for task in last:
        shards = range(graph.num_stages, graph.num_stages + ranks)
        logits = [Task(S, shard, task.slice) for shard in shards]
        gradients = [Task(T, shard, task.slice) for shard in shards]
        for own, gradient in zip(logits, gradients, strict=True):
            needs[own] = (Need(task, HIDDEN),)
            needs[gradient] = tuple(Need(each, STATISTICS) for each in logits)
            holds[own] = tuple(Hold(DEVICE, name, 1) for name in held)
            holds[gradient] = tuple(Hold(DEVICE, name, -1) for name in held)
        awaited = logits if barriers == 1 else gradients
        backward = task._replace(kind=B)
        needs[backward] = (*needs[backward], *(Need(each, GRADIENT) for each in awaited))
    kinds = {S: Kind('logits of a shard'), T: Kind('weight gradient of a shard')}
    collectives = {
        HIDDEN: Collective(BROADCAST),
        STATISTICS: Collective(GATHER),
        GRADIENT: Collective(REDUCE, STATISTICS if barriers == 1 else ''),
    }
    return made_of(graph, 'split_vocabulary', (ranks, barriers), needs, holds, kinds, collectives)
