"""WHAT moving activations makes of a graph: copies out behind F, and back before B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from megatron_zbpp.ir.graph import (
    COPY,
    DEVICE,
    HOST,
    KV,
    KV_GRADIENT,
    PARTNER,
    TRANSFERS,
    F,
    Graph,
    Hold,
    Kind,
    Need,
    Transfers,
)
from megatron_zbpp.ir.techniques import instead, known_stages, made_of

_WORDS = {
    HOST: Transfers('offload', 'load'),
    PARTNER: Transfers('eviction to a partner', 'taking back'),
}


def offload(graph: Graph, stages: Iterable[int], to: str = HOST) -> Graph:
    """Return what forwards of `stages` hold waits elsewhere: moved out after F, and back before B.

    (PipeOffload, arXiv 2503.01328; to a partner: BPipe, ICML 2023.) A microbatch may stay: then a
    schedule has neither pass of it.

    Args:
        graph: any.
        stages: of it.
        to: 'host', by O and L; or 'partner', the rank that has room, by E and K.
    """
    if to not in TRANSFERS:
        raise ValueError(f'offload to {to!r}: give {HOST!r} or {PARTNER!r}')
    out, back = TRANSFERS[to]
    stages = known_stages(graph, stages)
    needs, holds = dict(graph.needs), dict(graph.holds)
    for task in [t for t in graph.needs if t.kind == F and t.stage in stages]:
        away, here = task._replace(kind=out), task._replace(kind=back)
        if any(task._replace(kind=ways.out) in graph.needs for ways in TRANSFERS.values()):
            raise ValueError(f'stage {task.stage} is moved already: name it once')
        # B, or R where that comes first
        users = [user for user, _ in graph.feeds[task] if user.stage == task.stage]
        users = [user for user in users if user.kind != F]
        needs[away], needs[here] = (Need(task),), (Need(away),)
        for user in users:
            needs[user] = instead(needs[user], task, here)
        own = [h for h in holds[task] if h.pool == DEVICE and h.amount not in (KV, KV_GRADIENT)]
        left = Counter({h.amount: h.change for h in own})
        holds[away] = _moved(left, DEVICE, to)
        holds[here] = _moved(left, to, DEVICE)
    kinds = {
        kind: Kind(words, engine=COPY, in_order=False, optional=True)
        for kind, words in zip(TRANSFERS[to], _WORDS[to], strict=True)
    }
    return made_of(graph, 'offload', (stages, to), needs, holds, kinds)


def _moved(amounts: Mapping[str, int], source: str, target: str) -> tuple[Hold, ...]:
    return tuple(
        hold
        for amount, count in amounts.items()
        for hold in (Hold(source, amount, -count), Hold(target, amount, count))
    )
