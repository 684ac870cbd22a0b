"""The modules of Transformer Engine in a model chunk that put off their weight gradients."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from megatron_zbpp.mcore.patches.transformer_engine.module import (
    Chunk,
    DelayedModule,
    delayed,
    inner,
)
from megatron_zbpp.runtime.weight_grads import Gradients, WeightGradStore

_NOTHING = contextlib.nullcontext()


def delaying_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the TE modules in `model` that were built to delay their weight gradients.

    Raises:
        NotImplementedError: one of them keeps its weight in parts or in a GroupedTensor, or reduces
            it by itself.
    """
    every: Iterator[Any] = model.modules()
    modules = [
        module
        for module in every
        if getattr(module, 'wgrad_store', None) is not None and module.wgrad_store.enabled
    ]
    for module in modules:
        if len(getattr(module, 'weight_names', ())) > 1:
            raise NotImplementedError(
                f'{type(module).__name__} has its weight in the parts {module.weight_names}, whose '
                'delayed gradients Transformer Engine loses; build it without parameters_split'
            )
        if getattr(module, 'use_grouped_tensor', False):
            raise NotImplementedError(
                f'{type(module).__name__} uses GroupedTensor, which W passes cannot keep; build it '
                'with use_grouped_tensor=False'
            )
        if getattr(module, 'wgrad_accumulation_and_reduce_hooks', ()):
            raise NotImplementedError(
                'DistributedDataParallelConfig.delay_wgrad_compute does not work with schedules '
                'that split the backward, which delay by themselves; leave it out'
            )
    return modules


# of chunks that were looked through; no strong references, for a module may be a chunk itself
_known: WeakKeyDictionary[torch.nn.Module, list[weakref.ref]] = WeakKeyDictionary()


def _known_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return `delaying_modules`, looked for once; anew where one of them is gone."""
    found = [known() for known in _known.get(model, ())]
    if model not in _known or None in found:
        found = delaying_modules(model)
        _known[model] = list(map(weakref.ref, found))
    return cast(list[torch.nn.Module], found)


class Delaying:
    """The TE modules of a model chunk that delay; from now on they leave it to `store`.

    Raises:
        NotImplementedError: as `delaying_modules`.
    """

    def __init__(self, model: torch.nn.Module, store: WeightGradStore) -> None:
        self.modules = _known_modules(model)
        self._chunk = Chunk(store)
        for module in self.modules:
            delayed(module).join(self._chunk)

    def queueing(self) -> AbstractContextManager[None]:
        """Enter a backward of the chunk: what its modules put off in it goes to the store."""
        return self._queueing() if self.modules and self._chunk.store.deferring else _NOTHING

    @contextlib.contextmanager
    def _queueing(self) -> Iterator[None]:
        chunk = self._chunk
        chunk.runs = runs = []
        try:
            yield
        finally:
            chunk.runs = None
        early: dict[DelayedModule, Gradients | None] = {}
        for module, entries in runs:
            first = module not in early
            if first:
                early[module] = module.early()
            module.defer(entries, early[module], first)


def left_over(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return parameters of `model` whose weight gradients are put off, and no W has run."""
    return {
        parameter
        for module in delaying_modules(model)
        if 'put' in vars(module.wgrad_store) and delayed(module).waiting
        for parameter in delayed(module).trained
    }


@contextlib.contextmanager
def strays() -> Iterator[list[tuple[torch.Size, ...]]]:
    """Collect what TE's stores take in meanwhile that are not ours to run: shapes of operands.

    Such are those of modules that `model.modules()` does not find.
    """
    common = sys.modules.get('transformer_engine.pytorch.module._common')
    found: list[tuple[torch.Size, ...]] = []
    if common is None:
        yield found
        return
    original = common.WeightGradStore.put

    @functools.wraps(original)
    def put(self: Any, tensors: list, function: Callable) -> None:
        found.append(tuple(tensor.shape for tensor in inner(tensors)))
        original(self, tensors, function)

    common.WeightGradStore.put = put
    try:
        yield found
    finally:
        common.WeightGradStore.put = original
