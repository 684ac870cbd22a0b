"""Techniques: whatever is done to a pipeline beyond F, B and W. Each is a file or a folder.

It has a function from graph to graph, WHAT is done, and functions that put the passes into given
orders, WHEN. `TECHNIQUE` is the value by which the planner, flags and commands know of it. There
are schedules, too, that are another one with the technique. `composition` has the pairs of
techniques that do not go together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from megatron_zbpp.ir.techniques import register as register_graph

if TYPE_CHECKING:
    from megatron_zbpp.ir import Schedule
    from megatron_zbpp.techniques.base import Technique

NAMES = ('offload', 'recompute', 'evict')  # that are placed into orders
ASKED = ('offload', 'recompute')  # of which a user asks for an amount, by an option of their name
# Modules of the functions from graph to graph, by the names that files have.
GRAPHS = {
    'recompute': 'recompute',
    'offload': 'offload',
    'sliced': 'slices.graph',
    'exchanging_context': 'slices.graph',
    'split_embedding': 'vocabulary.graph',
    'split_vocabulary': 'vocabulary.graph',
    'updating': 'updates.versions',
}
# functions that put techniques without an amount into a schedule
_ADDED = {
    'split_vocabulary': 'vocabulary.place:with_shards',
    'split_embedding': 'vocabulary.place:with_embedding',
}
_OWN: dict[str, Technique] = {}  # registered by others

HALF, ALL = 'half', 'all'
Amount = str | int
"""'half', 'all', or how many chunks of each rank: the first, whose activations wait longest."""


def find(name: str) -> Technique:
    """Return the technique of that name, imported when it is asked for."""
    if name in _OWN:
        return _OWN[name]
    if name not in NAMES:
        raise ValueError(f'action {name!r} is unknown: use {", ".join((*NAMES, *_OWN))}')
    return importlib.import_module(f'{__name__}.{name}').TECHNIQUE


def added(name: str) -> Callable[[Schedule], Schedule]:
    """Return the function that puts a technique without an amount into a schedule."""
    return resolve_name(f'{__name__}.{_ADDED[name]}')


def find_all(names: Iterable[str]) -> tuple[Technique, ...]:
    """Return the techniques of these names, in the order of `zbpp --help`."""
    order = (*NAMES, *_OWN)
    return tuple(sorted(map(find, names), key=lambda technique: order.index(technique.name)))


def placed_in_turn(techniques: Iterable[Technique]) -> list[Technique]:
    """Return them in the order in which they are placed.

    Copies are given times when all that computes is in its place.
    """
    return sorted(techniques, key=lambda technique: technique.moves)


def register(technique: Technique) -> Technique:
    """Enter a technique of one's own, so that it is found by its name; return it."""
    if technique.name in NAMES:
        raise ValueError(f'technique {technique.name!r} is one of the library: choose another name')
    if technique.name != technique.graph.__name__:
        raise ValueError(
            f'technique {technique.name!r} has the graph {technique.graph.__name__!r}, by which '
            'files know it: give both one name'
        )
    register_graph(technique.graph)
    _OWN[technique.name] = technique
    return technique


def chunks_of(amount: Amount, num_chunks: int, what: str, words: tuple[str, ...] = ()) -> int:
    """Return how many chunks of a rank that is.

    `what` is done with them, and `words` are other amounts, for errors.
    """
    if amount == HALF:
        return (num_chunks + 1) // 2
    if amount == ALL:
        return num_chunks
    if isinstance(amount, str) and amount.isdecimal():
        amount = int(amount)
    if isinstance(amount, bool) or not isinstance(amount, int) or amount < 1:
        known = ', '.join(map(repr, (HALF, ALL, *words)))
        raise ValueError(f'{what} of {amount!r}: give {known} or a number of chunks')
    if amount > num_chunks:
        raise ValueError(
            f'{what} of {amount} chunks: a rank has {num_chunks}: give a number up to {num_chunks}'
        )
    return amount
