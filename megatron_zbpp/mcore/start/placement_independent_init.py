"""Initial weights that stock Megatron draws, whatever the placement of the stages.

The chunks of a rank are drawn from the random states of stock Megatron's ranks. Each part of a
chunk begins with the states that the part before it in stock's order has left, wherever that was
drawn. Nothing is drawn twice, and nothing is held but the states. Stages are texts in the language
of Megatron's layout: E, t, m and L.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.layout import layers_per_stage, layout_string
from megatron_zbpp.mcore import layout
from megatron_zbpp.mcore.side_effects import random_states, set_random_states
from megatron_zbpp.runtime.compat import another_client, default_store
from megatron_zbpp.runtime.log import job_log


class Part(NamedTuple):
    """A part of a stage that is drawn in one go."""

    stage: int  # of the schedule
    index: int  # 0 for what comes before the layers, then the layers, then all behind them


Chains = tuple[tuple[Part, ...], ...]  # by stock rank, in the order in which it draws


def chains(stock: Sequence[str], stages: Sequence[str], num_ranks: int) -> Chains:
    """Return the parts of our stages in the order in which each rank of stock Megatron draws them.

    >>> chains(['Ett', 'ttL'], ['Et', 't', 't', 'tL'], 2)[1]
    (Part(stage=2, index=1), Part(stage=3, index=1), Part(stage=3, index=2))
    """
    where: dict[str, Part] = {}
    for stage, keys in enumerate(_keys(stages)):
        layers = stages[stage].count('t')
        for key in keys:
            place = 0 if key in ('E', 'copy') else layers + 1
            where[key] = Part(stage, place)
        numbers = [key for key in keys if key.isdigit()]
        where |= {key: Part(stage, place) for place, key in enumerate(numbers, 1)}
    drawn = list(_keys(stock))
    return tuple(
        tuple(dict.fromkeys(where[key] for keys in drawn[rank::num_ranks] for key in keys))
        for rank in range(num_ranks)
    )


def _keys(stages: Sequence[str]) -> Iterator[list[str]]:
    first = 0
    for stage in stages:
        layers = range(first, first + stage.count('t'))
        first = layers.stop
        before = ['E'] if 'E' in stage else ['copy'] if 'm' in stage else []
        behind = [letter for letter in 'mL' if letter in stage]
        yield [*before, *map(str, layers), *behind]


def can_be_drawn(drawn: Chains, placement: Placement) -> bool:
    """Return whether no rank waits forever where each builds its chunks in their order.

    First and last stage wait for each other at their ends, as Megatron makes what is tied equal.
    """
    before = {part: chain[:place] for chain in drawn for place, part in enumerate(chain)}
    ends, placed = (0, placement.num_stages - 1), placement.only_route
    meet = placed[0] != placed[-1]
    waiting = []
    for rank in range(placement.num_ranks):
        own = []
        for stage in placement.stages(rank):
            own += sorted(part for part in before if part.stage == stage)
            own += [stage] * (meet and stage in ends)
        waiting.append(own[::-1])
    done: set[Part] = set()
    moved = True
    while moved and any(waiting):
        moved = False
        for own in waiting:
            while own and isinstance(own[-1], Part) and done.issuperset(before[own[-1]]):
                done.add(own.pop())
                moved = True
        met = [own for own in waiting if own and not isinstance(own[-1], Part)]
        if len(met) == len(ends):
            for own in met:
                own.pop()
            moved = True
    return not any(waiting)


def stages_of(given: Mapping[str, Any], placement: Placement) -> list[str]:
    """Return the parts of each stage, in model order, in the language of Megatron's layout."""
    pattern = given.get('hybrid_layer_pattern') or given.get('hybrid_override_pattern')
    if pattern is None:
        return layout.text_by_config(given['config'], placement).split('|')
    main, _, mtp = pattern.partition('/')
    return layout_string([len(segment) for segment in main.split('|')], bool(mtp)).split('|')


def chains_of(asked: bool | str, stages: Sequence[str], placement: Placement) -> Chains | None:
    """Return in which order stock Megatron draws the parts of the stages.

    None where ranks would wait for each other forever.

    Args:
        asked: the stages of stock Megatron; True: one a rank, as even as can be.
        stages: of the schedule, as `stages_of`.
        placement: of the stages.

    Raises:
        ValueError: the stages of stock Megatron have other layers.
    """
    stock = asked.split('|') if isinstance(asked, str) else _one_a_rank(stages, placement)
    layers = [''.join(each).strip('EL') for each in (stock, stages)]
    if layers[0] != layers[1] or len(stock) % placement.num_ranks:
        raise ValueError(
            f'same_start {"|".join(stock)} is not of this model, which has {"|".join(stages)} on '
            f'{placement.num_ranks} ranks: give the stages of stock Megatron with as many layers, '
            'or leave it True'
        )
    drawn = chains(stock, stages, placement.num_ranks)
    if can_be_drawn(drawn, placement):
        return drawn
    job_log.warning(
        'initial weights are not those of stock Megatron: its order of drawing them would keep '
        'ranks waiting for each other'
    )
    return None


def _one_a_rank(stages: Sequence[str], placement: Placement) -> list[str]:
    """Return the stages of 1F1B with the same layers, as even as can be."""
    text, ranks = ''.join(stages), placement.num_ranks
    layers = text.count('t')
    if layers < ranks:  # Megatron has no such stages
        return layout_string([layers] + [0] * (ranks - 1), text.count('m')).split('|')
    counts = layers_per_stage(layers, Placement.loop(ranks))
    return layout_string(counts, text.count('m')).split('|')


Collective = Callable[[str], AbstractContextManager[None]]
_Link = tuple[int, int]  # a stock rank, and how many parts it has drawn


class StockDrawing:
    """The random states of one model while the ranks of a pipeline build it."""

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
        """Draw a part from now on; parts that stock lacks draw from this rank's own states."""
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
    """Return whether all ranks of a pipeline give the same text: else they would wait for ever."""
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
