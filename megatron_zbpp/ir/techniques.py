"""Techniques: functions from graph to graph, which compose.

>>> from megatron_zbpp.ir.graph import Task, chain
>>> graph = offload(recompute(chain(4), (0, 1)), (0,))
>>> [str(need.task) for need in graph.needs[Task('R', 0)]]
['0L']
>>> graph.techniques[1]
Technique(name='offload', arguments=((0,), 'host'))

Those that the executor cannot run yet it refuses by name: see `runtime.executor`.
"""

from __future__ import annotations

import copyreg
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron_zbpp.ir.graph import (
    COPY,
    DEVICE,
    HOST,
    PARTNER,
    B,
    F,
    Graph,
    Hold,
    Kind,
    Need,
    Task,
    Technique,
    W,
    chain,
)


class Transfers(NamedTuple):
    """Kinds of the passes that move what a forward holds elsewhere and back."""

    out: str
    back: str


R = 'R'  # a forward again
TRANSFERS: Mapping[str, Transfers] = {  # by pool
    HOST: Transfers('O', 'L'),
    PARTNER: Transfers('E', 'K'),
}
_WORDS = {
    HOST: Transfers('offload', 'load'),
    PARTNER: Transfers('eviction to a partner', 'taking back'),
}

_Needs = dict[Task, tuple[Need, ...]]
_Holds = dict[Task, tuple[Hold, ...]]


def recompute(graph: Graph, stages: Iterable[int]) -> Graph:
    """Make forwards of `stages` keep their input only; R makes the activation again, before B.

    (Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; per stage as in
    GPipe, arXiv 1811.06965, section 2.3.)
    """
    stages = _known(graph, stages)
    needs, holds = dict(graph.needs), dict(graph.holds)
    for task in [t for t in graph.needs if t.kind == F and t.stage in stages]:
        again, backward = task._replace(kind=R), task._replace(kind=B)
        # its own forward, or what brings back what that has left
        (kept,) = (n for n in needs[backward] if n.task.stage == task.stage and n.task.kind != B)
        needs[again] = (kept,)
        needs[backward] = _instead(needs[backward], kept.task, again)
        if again in graph.needs:
            raise ValueError(f'stage {task.stage} is recomputed already: name it once')
        holds[again] = (Hold(DEVICE, 'input', -1), Hold(DEVICE, 'activation', 1))
        for other in _between(graph, task, kept.task):
            holds[other] = tuple(
                hold._replace(amount='input') if hold.amount == 'activation' else hold
                for hold in graph.holds[other]
            )
    return _made(
        graph, 'recompute', (stages,), needs, holds, {R: Kind('recomputation', in_order=False)}
    )


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
    stages = _known(graph, stages)
    needs, holds = dict(graph.needs), dict(graph.holds)
    for task in [t for t in graph.needs if t.kind == F and t.stage in stages]:
        away, here = task._replace(kind=out), task._replace(kind=back)
        # B, or R where that comes first
        users = [user for user, _ in graph.feeds[task] if user.stage == task.stage]
        users = [user for user in users if user.kind != F]
        needs[away], needs[here] = (Need(task),), (Need(away),)
        for user in users:
            needs[user] = _instead(needs[user], task, here)
        left = Counter({h.amount: h.change for h in holds[task] if h.pool == DEVICE})
        holds[away] = _moved(left, DEVICE, to)
        holds[here] = _moved(left, to, DEVICE)
    kinds = {
        kind: Kind(words, engine=COPY, in_order=False, optional=True)
        for kind, words in zip(TRANSFERS[to], _WORDS[to], strict=True)
    }
    return _made(graph, 'offload', (stages, to), needs, holds, kinds)


def sliced(graph: Graph, slices: int) -> Graph:
    """Each sequence is cut into slices (Seq1F1B, arXiv 2406.03488).

    F of a slice needs that of the slice before (its keys and values), B that of the slice behind
    (their gradients).
    """
    if slices < 1:
        raise ValueError(f'{slices} slices: give at least 1')
    if graph.num_slices > 1:
        raise ValueError('the graph is sliced already: slice it once')
    needs: _Needs = {}
    holds: _Holds = {}
    for task, old in graph.needs.items():
        for part in range(slices):
            own = task._replace(slice=part)
            new = [need._replace(task=need.task._replace(slice=part)) for need in old]
            other = {F: part - 1, B: part + 1}.get(task.kind, -1)
            if 0 <= other < slices:
                new.append(Need(task._replace(slice=other)))
            needs[own], holds[own] = tuple(new), graph.holds[task]
    return _made(graph, 'sliced', (slices,), needs, holds, {})


def split_vocabulary(graph: Graph, ranks: int, barriers: int = 1) -> Graph:
    """Each rank has a shard of the output layer: S makes its logits, T its weight gradient.

    (Vocabulary Parallelism, arXiv 2411.05288.) The last stage's B waits for S on all ranks, where
    there is one barrier (algorithm 2), or for T on all ranks, where there are two (algorithm 1).

    Args:
        graph: any.
        ranks: of the pipeline; the shard of rank r counts as stage S + r.
        barriers: 1 or 2.
    """
    if barriers not in (1, 2):
        raise ValueError(f'{barriers} barriers: give 1 (algorithm 2) or 2 (algorithm 1)')
    needs, holds = dict(graph.needs), dict(graph.holds)
    last = [t for t in graph.needs if t.kind == F and t.stage == graph.num_stages - 1]
    for task in last:
        shards = range(graph.num_stages, graph.num_stages + ranks)
        logits = [Task('S', shard, task.slice) for shard in shards]
        gradients = [Task('T', shard, task.slice) for shard in shards]
        for own, gradient in zip(logits, gradients, strict=True):
            needs[own] = (Need(task, 'hidden'),)
            needs[gradient] = tuple(Need(each, 'statistics') for each in logits)
            holds[own] = (Hold(DEVICE, 'logits', 1),)
            holds[gradient] = (Hold(DEVICE, 'logits', -1),)
        awaited = logits if barriers == 1 else gradients
        backward = task._replace(kind=B)
        needs[backward] = (*needs[backward], *(Need(each, 'vocabulary') for each in awaited))
    kinds = {'S': Kind('logits of a shard'), 'T': Kind('weight gradient of a shard')}
    return _made(graph, 'split_vocabulary', (ranks, barriers), needs, holds, kinds)


def updating(graph: Graph, every: int = 1, everywhere: bool = False) -> Graph:
    """U steps a stage's weights once in `every` microbatches, after their last W.

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
    return _made(graph, 'updating', (every, everywhere), needs, holds, kinds)


TECHNIQUES: Mapping[str, Callable[..., Graph]] = {
    function.__name__: function
    for function in (recompute, offload, sliced, split_vocabulary, updating)
}


def applied(num_stages: int, techniques: Iterable[Technique]) -> Graph:
    """Return the graph that these techniques make of a plain pipeline.

    Raises:
        ValueError: no such technique, or arguments that it does not take.
    """
    graph = chain(num_stages)
    for name, arguments in techniques:
        if name not in TECHNIQUES:
            raise ValueError(f'technique {name!r} is not known: there are {", ".join(TECHNIQUES)}')
        try:
            graph = TECHNIQUES[name](graph, *arguments)
        except TypeError as error:
            raise ValueError(f'technique {name} does not take {arguments}: {error}') from error
    return graph


def _reduced(graph: Graph) -> tuple[Callable[..., Graph], tuple[object, ...]]:
    return applied, (graph.num_stages, graph.techniques)


copyreg.pickle(Graph, _reduced)  # small, and made anew where it arrives


def _between(graph: Graph, first: Task, last: Task) -> Iterator[Task]:
    """Yield `last`, what it needs of its stage, and so on until `first`."""
    yield last
    if last != first:
        yield from _between(graph, first, graph.needs[last][0].task)


def _known(graph: Graph, stages: Iterable[int]) -> tuple[int, ...]:
    """Return `stages`, ascending, each once.

    Raises:
        ValueError: one is not of the graph.
    """
    chosen = tuple(sorted(set(stages)))
    for stage in chosen:
        if stage not in range(graph.num_stages):
            raise ValueError(f'stage {stage}: there are stages 0 to {graph.num_stages - 1}')
    return chosen


def _instead(needs: tuple[Need, ...], old: Task, new: Task) -> tuple[Need, ...]:
    return tuple(need._replace(task=new) if need.task == old else need for need in needs)


def _moved(amounts: Mapping[str, int], source: str, target: str) -> tuple[Hold, ...]:
    return tuple(
        hold
        for amount, count in amounts.items()
        for hold in (Hold(source, amount, -count), Hold(target, amount, count))
    )


def _made(
    graph: Graph,
    name: str,
    arguments: tuple[object, ...],
    needs: _Needs,
    holds: _Holds,
    kinds: Mapping[str, Kind],
) -> Graph:
    technique = Technique(name, arguments)
    return replace(
        graph,
        techniques=(*graph.techniques, technique),
        needs=needs,
        holds=holds,
        kinds={**graph.kinds, **kinds},
    )
