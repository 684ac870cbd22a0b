"""Draws the chunks of this rank from the random states of stock Megatron's ranks.

Each part of a chunk begins with the states that the part before it in stock's order has left,
wherever that was drawn. Nothing is drawn twice, and nothing is held but the states.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.same_start.order import Chains, Part
from megatron_zbpp.mcore.side_effects import random_states, set_random_states
from megatron_zbpp.runtime.compat import another_client, default_store

Collective = Callable[[str], AbstractContextManager[None]]
_Link = tuple[int, int]  # a stock rank, and how many parts it has drawn


class Drawing:
    """The random states of one model while the ranks of a pipeline build it.

    Args:
        name: of this model in the store: alike on all ranks of the pipeline, and on no others.
        rank: of the pipeline.
        placement: of the stages.
        chains: by stock rank, the parts in its order.
        collective: lets the watchdog watch a wait.
    """

    def __init__(
        self, name: str, rank: int, placement: Placement, chains: Chains, collective: Collective
    ) -> None:
        self._name, self._rank, self._collective = name, rank, collective
        self._chains = chains
        self._held_by = placement.only_route
        self._links: dict[Part, _Link] = {
            part: (stock, place)
            for stock, chain in enumerate(chains)
            for place, part in enumerate(chain)
        }
        self._kept: dict[_Link, Any] = {}
        self._part: Part | None = None
        self._store: Any = None
        self._own = _states()
        self._hand_over((rank, 0), self._own)

    def switch(self, place: tuple[int, int]) -> None:
        """Draw a part from now on; what is none of stock's is drawn from this rank's own states.

        Args:
            place: stage and index of `Part`.
        """
        part = Part(*place)
        if part == self._part:
            return
        self._leave()
        link = self._links.get(part)
        if link is not None:
            states = self._take(link)
            self._part = part
            _set_states(states)

    def pause(self) -> None:
        """Draw from this rank's own states from now on."""
        self._leave()

    def end(self) -> None:
        """Go on with the states that stock's rank of this number has behind its model."""
        self._leave()
        _set_states(self._take((self._rank, len(self._chains[self._rank]))))

    def _leave(self) -> None:
        """Hand the states of the part that was drawn to the next one."""
        if self._part is None:
            self._own = _states()
            return
        stock, place = self._links[self._part]
        self._part = None
        self._hand_over((stock, place + 1), _states())
        _set_states(self._own)

    def _user(self, link: _Link) -> int:
        """Return the rank that goes on from there."""
        stock, place = link
        chain = self._chains[stock]
        return self._held_by[chain[place].stage] if place < len(chain) else stock

    def _hand_over(self, link: _Link, states: Any) -> None:
        if self._user(link) == self._rank:
            self._kept[link] = states
        else:
            self._client().set(self._key(link), pickle.dumps(states))

    def _take(self, link: _Link) -> Any:
        if link in self._kept:
            return self._kept.pop(link)
        key, store = self._key(link), self._client()
        stock, place = link
        with self._collective(f'random states of rank {stock} behind {place} parts of the model'):
            states = pickle.loads(store.get(key))
        store.delete_key(key)
        return states

    def _key(self, link: _Link) -> str:
        return f'{self._name} {link[0]} {link[1]}'

    def _client(self) -> Any:
        if self._store is None:  # one for itself: a get would keep other threads waiting
            self._store = another_client(default_store())
        return self._store


def say_the_same(name: str, rank: int, num_ranks: int, text: str, collective: Collective) -> bool:
    """Return whether all ranks of a pipeline give the same text: else they would wait for ever.

    Args:
        name: of the model, as `Drawing` has it.
        rank: of the pipeline.
        num_ranks: of the pipeline.
        text: that this rank gives.
        collective: lets the watchdog watch the wait.
    """
    store = another_client(default_store())
    store.set(f'{name} rank {rank}', text)
    with collective('stages of a model as its ranks have them'):
        return len({bytes(store.get(f'{name} rank {each}')) for each in range(num_ranks)}) == 1


def _states() -> tuple:
    return random.getstate(), np.random.get_state(), random_states()


def _set_states(states: tuple) -> None:
    python, array, (host, device, tracked) = states
    random.setstate(python)
    np.random.set_state(array)
    _, _, own = random_states()
    set_random_states(host, device, {name: tracked.get(name, own[name]) for name in own})
