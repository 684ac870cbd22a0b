"""Patches by which a model's parts are drawn as stock Megatron's ranks would draw them."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.building import chunk_being_built
from megatron_zbpp.mcore.layout import require_placed
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.mcore.session import Session

if TYPE_CHECKING:
    from megatron_zbpp.mcore.start.placement_independent_init import StockDrawing

_Models = weakref.WeakKeyDictionary[dist.ProcessGroup, int]
# how many models the ranks of a pipeline have begun: so long as its group lives, alike on all
_begun: _Models = weakref.WeakKeyDictionary()


def patches(session: Session) -> Iterator[Patch]:
    """Yield the patches that tell apart the parts of a model while it is built."""
    if session.settings.same_start is False:
        return
    chunks = _Chunks(session)
    models, stacks = compat.models_and_stacks()
    for module, model in models:
        yield Patch(f'{module}:{model}', '__init__', chunks.of_model, late=model != 'GPTModel')
    for module, stack in stacks:
        yield Patch(f'{module}:{stack}', '__init__', chunks.of_stack, late=True)
        yield Patch(module, 'build_module', chunks.of_layer, late=True)


class _Chunks:
    """Tells the `StockDrawing` of a model which part is built."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._drawing: StockDrawing | None = None
        self._building: StockDrawing | None = (
            None  # of the chunk that is being built, as are these:
        )
        self._stage, self._layers, self._built, self._last = 0, 0, 0, False

    def of_model(self, original: Callable) -> Callable:
        """Wrap the constructor of a model."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(model, *args, **kwargs)
            bound.apply_defaults()
            self._building = self._begin(model, bound.arguments)
            try:
                original(model, *args, **kwargs)
            finally:
                drawing, self._building = self._building, None
            if drawing is not None and self._last:
                drawing.end()
                self._drawing = None
            elif drawing is not None:
                drawing.pause()

        return __init__

    def of_layer(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def build_module(*args: Any, **kwargs: Any) -> Any:
            drawing, more = self._building, self._built < self._layers
            if drawing is None or not more or 'layer_number' not in kwargs:
                return original(*args, **kwargs)
            self._built += 1
            drawing.switch((self._stage, self._built))
            layer = original(*args, **kwargs)
            drawing.pause()
            return layer

        return build_module

    def of_stack(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def __init__(stack: Any, *args: Any, **kwargs: Any) -> None:
            original(stack, *args, **kwargs)
            if self._building is not None:
                self._building.switch((self._stage, self._layers + 1))

        return __init__

    def _begin(self, model: Any, given: dict[str, Any]) -> StockDrawing | None:
        """Return the drawing of a chunk that is about to be built; None: it draws as it will."""
        config = given['config']
        if config.pipeline_model_parallel_size == 1 or not dist.is_initialized():
            return None
        groups = given.get('pg_collection')
        own = getattr(groups, 'pp', None)
        group: Any = own or parallel_state.get_pipeline_model_parallel_group()
        chunk = given.get('vp_stage')
        chunk = (chunk_being_built() if chunk is None else chunk) or 0
        placement = self._session.programs.placement(group.size())
        if placement.is_loop:
            return None  # as stock's is
        require_placed(model, placement, config)  # here already, or parts were looked for in vain
        from megatron_zbpp.mcore.start.placement_independent_init import stages_of

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
        from megatron_zbpp.mcore.start.placement_independent_init import (
            StockDrawing,
            chains_of,
            say_the_same,
        )

        placement = self._session.programs.placement(group.size())
        number = _begun[group] = _begun.get(group, 0) + 1
        asked, collective = self._session.settings.same_start, self._session.collective
        pipeline = '-'.join(map(str, dist.get_process_group_ranks(group)))
        # groups that replace others have names of their own: what those left is not read again
        name = f'megatron_zbpp same start {pipeline} {group.group_name} {number}'
        said = f'{asked} {"|".join(stages)}'
        # where they differ, that is named before the first pass, when layers are compared
        if not say_the_same(name, group.rank(), group.size(), said, collective):
            return None
        chains = chains_of(asked, stages, placement)
        if chains is None:
            return None
        return StockDrawing(name, group.rank(), placement, chains, collective)
