"""Techniques as functions from graph to graph, which compose; each is in a folder of `techniques`.

>>> from megatron_zbpp.ir.graph import Task
>>> graph = applied(4, [('recompute', ((0, 1),)), ('offload', ((0,),))])
>>> [str(need.task) for need in graph.needs[Task('R', 0)]]
['0L']
>>> graph.techniques[1]
Applied(name='offload', arguments=((0,), 'host'))
"""

from __future__ import annotations

import copyreg
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from megatron_zbpp.ir.graph import Applied, Collective, Graph, Hold, Kind, Need, Task, chain

_Technique = Callable[..., Graph]
_REGISTERED: dict[str, _Technique] = {}


def register(technique: _Technique) -> _Technique:
    """Enter a function from graph to graph under its name, by which files find it; return it."""
    name = technique.__name__
    if name in _library():
        raise ValueError(f'technique {name!r} is one of the library: choose another name')
    _REGISTERED[name] = technique
    return technique


def _library() -> Mapping[str, str]:
    return importlib.import_module('megatron_zbpp.techniques').GRAPHS


def _find(name: str) -> _Technique:
    if module := _library().get(name):
        return getattr(importlib.import_module(f'megatron_zbpp.techniques.{module}'), name)
    if name not in _REGISTERED:
        known = ', '.join((*_library(), *_REGISTERED))
        raise ValueError(
            f'technique {name!r} is not known: there are {known}: import the module that registers '
            'another'
        )
    return _REGISTERED[name]


def applied(num_stages: int, techniques: Iterable[tuple[str, tuple[object, ...]]]) -> Graph:
    """Return the graph that these techniques make of a plain pipeline."""
    return _rebuilt(num_stages, [(_find(name), arguments) for name, arguments in techniques])


def _rebuilt(num_stages: int, techniques: Iterable[tuple[_Technique, tuple[object, ...]]]) -> Graph:
    graph = chain(num_stages)
    for technique, arguments in techniques:
        try:
            graph = technique(graph, *arguments)
        except TypeError as error:
            name = technique.__name__
            raise ValueError(f'technique {name} does not take {arguments}: {error}') from error
    return graph


copyreg.pickle(  # small, and made anew where it arrives
    Graph,
    lambda graph: (_rebuilt, (graph.num_stages, [(_find(n), a) for n, a in graph.techniques])),
)


def known_stages(graph: Graph, stages: Iterable[int]) -> tuple[int, ...]:
    """Return `stages`, ascending, each once."""
    chosen = tuple(sorted(set(stages)))
    for stage in chosen:
        if stage not in range(graph.num_stages):
            raise ValueError(f'stage {stage}: there are stages 0 to {graph.num_stages - 1}')
    return chosen


def instead(needs: tuple[Need, ...], old: Task, new: Task) -> tuple[Need, ...]:
    return tuple(need._replace(task=new) if need.task == old else need for need in needs)


def made_of(
    graph: Graph,
    name: str,
    arguments: tuple[object, ...],
    needs: Mapping[Task, tuple[Need, ...]],
    holds: Mapping[Task, tuple[Hold, ...]],
    kinds: Mapping[str, Kind],
    collectives: Mapping[str, Collective] = MappingProxyType({}),
) -> Graph:
    technique = Applied(name, arguments)
    return replace(
        graph,
        techniques=(*graph.techniques, technique),
        needs=needs,
        holds=holds,
        kinds={**graph.kinds, **kinds},
        collectives={**graph.collectives, **collectives},
    )
