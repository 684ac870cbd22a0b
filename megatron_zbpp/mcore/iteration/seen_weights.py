"""Refuse modules that do not see other versions of their weights, in their first forward."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatron_zbpp.mcore.side_effects import SideEffects
from megatron_zbpp.runtime.compat import unseen_by_autograd


def require_seen(models: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Have the first forward of each class of module that has trained weights run on others.

    Behind its own, it runs three times on the same input and random states: on its weights, on
    others elsewhere, and there on its own again, written in place. Outputs must differ each time,
    which a copy of the weights, or a captured graph, does not let them.

    Args:
        models: the chunks of this rank, before their first forward with versions.

    Returns:
        What ends this: modules that have run no forward keep nothing of it.

    The forward raises:
        NotImplementedError: a class does not see them.
    """
    waiting: dict[type, list[Any]] = defaultdict(list)  # hooks of classes that are to be asked
    for module in {id(each): each for model in models for each in model.modules()}.values():
        if _trained(module):
            hook = module.register_forward_hook(
                functools.partial(_after_forward, waiting), with_kwargs=True
            )
            waiting[type(module)].append(hook)

    def end() -> None:
        for hook in itertools.chain(*waiting.values()):
            hook.remove()
        waiting.clear()

    return end


def _after_forward(
    waiting: dict[type, list[Any]], module: torch.nn.Module, given: tuple, named: dict, _: Any
) -> None:
    kind = type(module)
    inputs = [each for each in _tensors((given, named)) if each.is_floating_point()]
    if not waiting[kind] or (inputs and not any(map(torch.any, inputs))):
        return  # of nothing but zeros any weights make the same, as of no tokens
    if not _sees(module, functools.partial(module.forward, *given, **named)):
        raise NotImplementedError(
            f'{kind.__module__}.{kind.__qualname__} does not see another version of its weights, '
            'as it computes with a copy or a captured graph: let its forward read its parameters, '
            'or take a synchronous schedule, such as zb-v'
        )
    for hook in waiting.pop(kind):
        hook.remove()


def _sees(module: torch.nn.Module, forward: Callable[[], Any]) -> bool:
    def run() -> list[torch.Tensor]:
        with SideEffects([module]).capture():
            return [each.detach() for each in _tensors(forward())]

    parameters = _trained(module)
    own = [each.data for each in parameters]
    outputs = [run()]
    try:
        for parameter in parameters:
            parameter.data = 1 - 2 * parameter.data
        outputs.append(run())
        with unseen_by_autograd(tuple(parameters)):
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data.copy_(data)
        outputs.append(run())
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data
    return not any(all(map(torch.equal, outputs[1], each)) for each in outputs[::2])


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    own = module.parameters(recurse=False)
    return [each for each in own if each.requires_grad]


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists and dicts."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, dict | tuple | list):
        for each in nested.values() if isinstance(nested, dict) else nested:
            yield from _tensors(each)
