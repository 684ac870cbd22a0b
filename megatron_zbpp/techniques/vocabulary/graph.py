"""WHAT shards of the output layer, and of the embedding, on all ranks make of a graph."""

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

USUAL_SHARE = 0.2
"""Forward of a rank's shard over that of its layers, where nobody says it."""

READ, LOOKUP, SCATTER = 'D', 'I', 'J'
TOKENS, EMBEDDING, EMBEDDING_GRADIENT = 'tokens', 'embedding', 'embedding_gradient'
"""Messages: the tokens that the first stage reads; the sum of the rows that all shards have of them
(one has the row, the others zeros); the gradient of that sum."""


def split_vocabulary(graph: Graph, ranks: int, barriers: int = 1) -> Graph:
    """Return the graph with a shard of the output layer a rank: S its logits, T its gradient.

    (Vocabulary Parallelism, arXiv 2411.05288.) The last stage's B waits for S on all ranks, where
    there is one barrier (algorithm 2), or for T on all ranks, where there are two (algorithm 1).
    The three messages are collectives: one broadcast, one gather, and one reduction.

    From S to T each rank holds its 'logits', and the broadcast 'hidden' states. With one barrier S
    makes its part of the gradient, too: 'gradient_part', which needs the statistics to be reduced.
    The shard of rank r counts as stage S + r.
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
    kinds = {
        S: Kind('logits of a shard', usual=2 * USUAL_SHARE),
        T: Kind('weight gradient of a shard', usual=USUAL_SHARE),
    }
    collectives = {
        HIDDEN: Collective(BROADCAST),
        STATISTICS: Collective(GATHER),
        GRADIENT: Collective(REDUCE, STATISTICS if barriers == 1 else ''),
    }
    return made_of(graph, 'split_vocabulary', (ranks, barriers), needs, holds, kinds, collectives)


def split_embedding(graph: Graph, ranks: int) -> Graph:
    """Return the graph with a shard of the word embedding a rank: I looks up, J is its gradient.

    D reads the tokens of a microbatch on the first stage and tells them to all ranks; I looks them
    up in its rows; the first stage's F takes the sum. Its B tells the gradient of that to J of all
    ranks, which comes behind T of its rank: a tied shard has its whole gradient with J.
    """
    kinds = {
        READ: Kind('reading of tokens'),
        LOOKUP: Kind('rows of a shard of the embedding'),
        SCATTER: Kind('gradient of a shard of the embedding'),
    }
    needs, holds = dict(graph.needs), dict(graph.holds)
    shards = range(graph.num_stages, graph.num_stages + ranks)
    for cut in range(graph.num_slices):
        reading, forward, backward = (Task(kind, 0, cut) for kind in (READ, F, B))
        needs[reading], holds[reading] = (), ()
        for shard in shards:
            rows, gradient = Task(LOOKUP, shard, cut), Task(SCATTER, shard, cut)
            behind = Task(T, shard, cut)
            if behind not in needs:
                raise ValueError(
                    f'split_embedding: there is no {behind}: the embedding is on all ranks where '
                    'the output layer is: apply split_vocabulary to as many ranks first'
                )
            needs[rows] = (Need(reading, TOKENS),)
            needs[gradient] = (Need(backward, EMBEDDING_GRADIENT), Need(behind))
            holds[rows] = holds[gradient] = ()
        looked_up = tuple(Need(Task(LOOKUP, shard, cut), EMBEDDING) for shard in shards)
        needs[forward] = (*needs[forward], *looked_up)
    collectives = {
        TOKENS: Collective(BROADCAST),
        EMBEDDING: Collective(REDUCE),
        EMBEDDING_GRADIENT: Collective(BROADCAST),
    }
    return made_of(graph, 'split_embedding', (ranks,), needs, holds, kinds, collectives)
