"""Transformer Engine's linear modules: what they put off, run by our W passes.

A TE module built with `delay_wgrad_compute` puts the computation of its weight gradients into a
queue of its own (`wgrad_store`), and `backward_dw()` runs the oldest. Here, what it puts off goes
to our `WeightGradStore` instead, and `backward_dw` gets it from there: so W passes may come in any
order, and an error leaves nothing behind. Where our store does not defer, the module is told that
it does not delay, and is stock.

While a module computes for us it finds aliases in place of its weights and biases, leaves of their
own: what autograd does with those in B reaches no parameter and no hook on it. Of what B leaves in
`.grad` of an alias only that of a bias is real, which FP8 computes there; GroupedLinear's weights
get memory that W is still to fill.

`backward_dw` leaves gradients in `.grad` of the aliases, or adds to `main_grad` when fused; W hands
the former to autograd. Of a module with one weight, what was put off returns its gradient and the
bias's, and W takes them there: `backward_dw` adds nothing but a third of the host's time.

`delayed_module`, which has all that a module does, is imported with the first chunk that has one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron_zbpp.mcore.patches.registry import Patch, around, replaced
from megatron_zbpp.runtime.weight_grads import Gradients, WeightGradStore


def patches(splits: Callable[[int], bool]) -> Iterator[Patch]:
    """Yield the patch of configs by which modules leave weight gradients to W passes."""
    if find_spec('transformer_engine') is not None:
        config = 'megatron.core.transformer.transformer_config:TransformerConfig'
        yield Patch(config, '__post_init__', around(_delaying, splits))


def _delaying(splits: Callable[[int], bool], original: Callable, self: Any) -> None:
    split = self.pipeline_model_parallel_size > 1 and splits(self.pipeline_model_parallel_size)
    if split:
        self.delay_wgrad_compute = False  # a copy has it, and Megatron would refuse it
    original(self)
    if split:
        delay_weight_gradients(self)


def delay_weight_gradients(config: Any) -> None:
    """Make TE modules built from `config` leave their weight gradients to `backward_dw`.

    To be called between the construction of the config, which refuses the setting without
    `overlap_moe_expert_parallel_comm`, and that of the model.
    """
    if config.tp_comm_overlap:
        raise NotImplementedError(
            'tp_comm_overlap does not work with schedules that split the backward: Transformer '
            'Engine cannot delay weight gradients with userbuffers; drop --tp-comm-overlap'
        )
    config.delay_wgrad_compute = True


_NOTHING = contextlib.nullcontext()


def delaying_modules(model: torch.nn.Module) -> list[Any]:
    """Return the TE modules in `model` that were built to delay their weight gradients.

    Raise NotImplementedError if one has its weight in parts or in a GroupedTensor, or reduces it.
    """
    stores = ((module, getattr(module, 'wgrad_store', None)) for module in model.modules())
    modules: list[Any] = [each for each, store in stores if store is not None and store.enabled]
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


class Delaying:
    """The TE modules of a model chunk that delay; from now on they leave it to `store`."""

    def __init__(self, model: torch.nn.Module, store: WeightGradStore) -> None:
        self.modules: list[Any] = [known() for known in _known.get(model, ())]
        if model not in _known or None in self.modules:  # one of them is gone
            self.modules = delaying_modules(model)
            _known[model] = list(map(weakref.ref, self.modules))
        if self.modules:
            from megatron_zbpp.mcore.layers.delayed_module import Chunk, delayed

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
        early: dict[Any, Gradients | None] = {}  # by module
        for module, entries in runs:
            first = module not in early
            if first:
                early[module] = module.early()
            module.defer(entries, early[module], first)


def left_over(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return parameters of `model` whose weight gradients are put off, and no W has run."""
    modules = delaying_modules(model)
    if not modules:
        return set()
    from megatron_zbpp.mcore.layers.delayed_module import delayed

    joined = [delayed(module) for module in modules if 'put' in vars(module.wgrad_store)]
    return {parameter for each in joined if each.waiting for parameter in each.trained}


@contextlib.contextmanager
def strays() -> Iterator[list[tuple[torch.Size, ...]]]:
    """Collect shapes of operands that TE's stores take in for modules that `modules()` lacks."""
    found: list[tuple[torch.Size, ...]] = []
    common = sys.modules.get('transformer_engine.pytorch.module._common')
    if common is None:
        yield found
        return
    from megatron_zbpp.mcore.layers.delayed_module import inner

    original = common.WeightGradStore.put

    @functools.wraps(original)
    def put(self: Any, tensors: list, function: Callable) -> None:
        found.append(tuple(tensor.shape for tensor in inner(tensors)))
        original(self, tensors, function)

    with replaced(common.WeightGradStore, 'put', put):
        yield found
