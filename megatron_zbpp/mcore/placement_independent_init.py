"""Initial weights that stock Megatron draws, whatever the placement of the stages.

The chunks of a rank are drawn from the random states of stock Megatron's ranks. Each part of a
chunk begins with the states that the part before it in stock's order has left, wherever that was
drawn. Nothing is drawn twice, and nothing is held but the states. Stages are texts in the language
of Megatron's layout: E, t, m and L.
"""

from __future__ import annotations

import inspect
import pickle
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.placement import layers_per_stage, layout_string
from megatron_zbpp.mcore import compat, layout
from megatron_zbpp.mcore.layout import chunk_being_built
from megatron_zbpp.mcore.patches.registry import Patch, around
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.side_effects import random_states, set_random_states
from megatron_zbpp.runtime.compat import another_client, default_store
from megatron_zbpp.runtime.log import job_log

# how many models the ranks of a pipeline have begun: so long as its group lives, alike on all
_begun: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def patches(session: Session) -> Iterator[Patch]:
    """Yield the patches that tell apart the parts of a model while it is built."""
    chunks = _Chunks(session)
    models, stacks = compat.models_and_stacks()
    for module, model in models:
        yield Patch(
            f'{module}:{model}', '__init__', around(chunks.of_model), late=model != 'GPTModel'
        )
    for module, stack in stacks:
        yield Patch(f'{module}:{stack}', '__init__', around(chunks.of_stack), late=True)
        yield Patch(module, 'build_module', around(chunks.of_layer), late=True)


class _Chunks:
    """Tells the `StockDrawing` of a model which part is built."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._drawing: StockDrawing | None = None  # of the model
        # of the chunk that is being built, as are these:
        self._building: StockDrawing | None = None
        self._stage, self._layers, self._built, self._last = 0, 0, 0, False

    def of_model(self, original: Callable, model: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        bound.apply_defaults()
        self._building = drawing = self._begin(model, bound.arguments)
        try:
            original(model, *args, **kwargs)
        finally:
            self._building = None
        if drawing is not None:
            drawing.pause()
        if drawing is not None and self._last:
            drawing.end()
            self._drawing = None

    def of_layer(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        drawing, more = self._building, self._built < self._layers
        if drawing is None or not more or 'layer_number' not in kwargs:
            return original(*args, **kwargs)
        self._built += 1
        drawing.switch((self._stage, self._built))
        layer = original(*args, **kwargs)
        drawing.pause()
        return layer

    def of_stack(self, original: Callable, stack: Any, *args: Any, **kwargs: Any) -> None:
        original(stack, *args, **kwargs)
        if self._building is not None:
            self._building.switch((self._stage, self._layers + 1))

    def _begin(self, model: Any, given: dict[str, Any]) -> StockDrawing | None:
        """Return the drawing of a chunk that is about to be built; None: it draws as it will."""
        config = given['config']
        if config.pipeline_model_parallel_size == 1 or not dist.is_initialized():
            return None
        own = getattr(given.get('pg_collection'), 'pp', None)
        group: Any = own or parallel_state.get_pipeline_model_parallel_group()
        chunk = given.get('vp_stage')
        chunk = (chunk_being_built() if chunk is None else chunk) or 0
        placement = self._session.programs.placement(group.size())
        if placement.is_loop:
            return None  # as stock's is
        # here already, or parts were looked for in vain
        layout.require_placed(model, placement, config)
        stages = stages_of(given, placement)
        if chunk == 0:
            self._drawing = self._first(group, stages)
        if self._drawing is None:
            return None
        self._stage = placement.stages(group.rank())[chunk]
        self._layers, self._built = stages[self._stage].count('t'), 0
        self._last = chunk == placement.num_chunks - 1
        self._drawing.switch((self._stage, 0))
        return self._drawing

    def _first(self, group: dist.ProcessGroup, stages: list[str]) -> StockDrawing | None:
        """Return the drawing of a model that is about to be built; None: it draws as it will."""
        placement = self._session.programs.placement(group.size())
        number = _begun[group] = _begun.get(group, 0) + 1
        asked = self._session.settings.same_start
        pipeline = '-'.join(map(str, dist.get_process_group_ranks(group)))
        # groups that replace others have names of their own: what those left is not read again
        name = f'megatron_zbpp same start {pipeline} {group.group_name} {number}'
        store: Any = another_client(default_store())  # a get keeps other threads of its own waiting
        store.set(f'{name} rank {group.rank()}', f'{asked} {"|".join(stages)}')
        with self._session.collective('stages of a model as its ranks have them'):
            said = {bytes(store.get(f'{name} rank {each}')) for each in range(group.size())}
        # where they differ, that is named before the first pass, when layers are compared
        drawn = chains_of(asked, stages, placement) if len(said) == 1 else None
        if drawn is None:
            return None
        return StockDrawing(self._session, group, drawn, name, store)


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
    keyed, drawn = enumerate(_keys(stages)), list(_keys(stock))
    where = {key: Part(stage, index) for stage, keys in keyed for key, index in keys.items()}
    return tuple(
        tuple(dict.fromkeys(where[key] for keys in drawn[rank::num_ranks] for key in keys))
        for rank in range(num_ranks)
    )


def _keys(stages: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield what each stage draws, with the index of its part: layers by their numbers."""
    first = 0
    for stage in stages:
        layers = range(first, first + stage.count('t'))
        first = layers.stop
        before = ['E'] if 'E' in stage else ['copy'] if 'm' in stage else []
        numbered = {str(layer): index for index, layer in enumerate(layers, 1)}
        behind = [letter for letter in 'mL' if letter in stage]
        yield dict.fromkeys(before, 0) | numbered | dict.fromkeys(behind, len(layers) + 1)


def can_be_drawn(drawn: Chains, placement: Placement) -> bool:
    """Return True if no rank waits forever where each builds its chunks in their order.

    First and last stage wait for each other at their ends, as Megatron makes what is tied equal.
    """
    ends, placed = (0, placement.num_stages - 1), placement.only_route
    meet = placed[0] != placed[-1]
    orders: list[Sequence[Part | str]] = [*drawn]
    for rank in range(placement.num_ranks):
        own: list[Part | str] = []
        for stage in placement.stages(rank):
            own += sorted(part for part in chain(*drawn) if part.stage == stage)
            own += ['meeting'] * (meet and stage in ends)
        orders.append(own)
    graph = TopologicalSorter[Part | str]()
    for before, after in chain.from_iterable(map(pairwise, orders)):
        graph.add(after, before)
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


def stages_of(given: Mapping[str, Any], placement: Placement) -> list[str]:
    """Return the parts of each stage, in model order, in the language of Megatron's layout."""
    pattern = given.get('hybrid_layer_pattern') or given.get('hybrid_override_pattern')
    if pattern is None:
        return layout.text_by_config(given['config'], placement).split('|')
    main, _, mtp = pattern.partition('/')
    return layout_string([len(segment) for segment in main.split('|')], bool(mtp)).split('|')


def chains_of(asked: bool | str, stages: Sequence[str], placement: Placement) -> Chains | None:
    """Return in which order stock Megatron draws the parts of the stages.

    None where ranks would wait for each other forever. `asked` are the stages of stock Megatron;
    True: one a rank, as even as can be.
    """
    ranks = placement.num_ranks
    if isinstance(asked, str):
        stock = asked.split('|')
    else:  # 1F1B's, as even as can be; of fewer layers than ranks Megatron has no stages
        text = ''.join(stages)
        count = text.count('t')
        few = [count] + [0] * (ranks - 1)
        counts = few if count < ranks else layers_per_stage(count, Placement.loop(ranks))
        stock = layout_string(counts, text.count('m')).split('|')
    layers = [''.join(each).strip('EL') for each in (stock, stages)]
    if layers[0] != layers[1] or len(stock) % ranks:
        raise ValueError(
            f'same_start {"|".join(stock)} is not of this model, which has {"|".join(stages)} on '
            f'{ranks} ranks: give the stages of stock Megatron with as many layers, '
            'or leave it True'
        )
    drawn = chains(stock, stages, ranks)
    if can_be_drawn(drawn, placement):
        return drawn
    job_log.warning(
        'initial weights are not those of stock Megatron: its order of drawing them would keep '
        'ranks waiting for each other'
    )
    return None


_Link = tuple[int, int]  # a stock rank, and how many parts it has drawn


class StockDrawing:
    """The random states of one model while the ranks of a pipeline build it."""

    def __init__(
        self, session: Session, group: dist.ProcessGroup, chains: Chains, name: str, store: Any
    ) -> None:
        self._collective, self._rank = session.collective, group.rank()
        self._chains, self._name, self._store = chains, name, store
        self._held_by = session.programs.placement(group.size()).only_route
        self._links: dict[Part, _Link] = {
            part: (stock, place)
            for stock, parts in enumerate(chains)
            for place, part in enumerate(parts)
        }
        self._kept: dict[_Link, Any] = {}
        self._part: Part | None = None
        self._own = _states()
        self._hand_over((self._rank, 0), self._own)

    def switch(self, place: tuple[int, int]) -> None:
        """Draw a part from now on; parts that stock lacks draw from this rank's own states."""
        part = Part(*place)
        if part == self._part:
            return
        self.pause()
        if (link := self._links.get(part)) is not None:
            states = self._take(link)
            self._part = part
            _set_states(states)

    def end(self) -> None:
        """Go on with the states that stock's rank of this number has behind its model."""
        self.pause()
        _set_states(self._take((self._rank, len(self._chains[self._rank]))))

    def pause(self) -> None:
        """Draw from this rank's own states; hand those of the part that was drawn to the next."""
        if self._part is None:
            self._own = _states()
            return
        stock, place = self._links[self._part]
        self._part = None
        self._hand_over((stock, place + 1), _states())
        _set_states(self._own)

    def _hand_over(self, link: _Link, states: Any) -> None:
        stock, place = link
        parts = self._chains[stock]
        user = self._held_by[parts[place].stage] if place < len(parts) else stock
        if user == self._rank:
            self._kept[link] = states
        else:
            self._store.set(self._key(link), pickle.dumps(states))

    def _take(self, link: _Link) -> Any:
        if link in self._kept:
            return self._kept.pop(link)
        key, (stock, place) = self._key(link), link
        with self._collective(f'random states of rank {stock} behind {place} parts of the model'):
            states = pickle.loads(self._store.get(key))
        self._store.delete_key(key)
        return states

    def _key(self, link: _Link) -> str:
        return f'{self._name} {link[0]} {link[1]}'


def _states() -> tuple:
    return random.getstate(), np.random.get_state(), random_states()


def _set_states(states: tuple) -> None:
    python, array, (host, device, tracked) = states
    random.setstate(python)
    np.random.set_state(array)
    _, _, own = random_states()
    set_random_states(host, device, {name: tracked.get(name, own[name]) for name in own})
