"""Transformer Engine's linear modules: their own queue of weight gradients, run by our W passes.

A TE module built with `delay_wgrad_compute` puts the computation of its weight gradient into a
queue of its own (`wgrad_store`) and runs the oldest on `backward_dw()`. Weight gradients of a stage
come in microbatch order, so first in, first out is what a W pass needs. `backward_dw` overwrites
`.grad`, or adds to `main_grad` when fused: what it leaves in `.grad` goes to autograd.

Autograd visits the parameters in B as well, with no gradient, with a bias gradient that FP8 has
computed there, or, when fused, with one that stands for what is in `main_grad`.
DistributedDataParallel's hooks run each time and want to see some gradient.

Not run by the tests of a machine without a GPU, where TE's modules cannot run. There, tests pin
what TE's sources say to what is written here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_zbpp.runtime.store import Key, WeightGradStore

_ADDED = 'grad_added_to_main_grad'  # a flag that DistributedDataParallel puts on parameters
_AT_ONCE: Key = (-1, -1)  # in the store, what no W pass runs
_NOTHING = contextlib.nullcontext()


def delay_weight_gradients(config: Any) -> None:
    """Makes TE modules built from `config` leave their weight gradients to `backward_dw`.

    To be called between the construction of the config, which refuses the setting without
    `overlap_moe_expert_parallel_comm`, and that of the model.

    Raises:
        NotImplementedError: TE cannot delay weight gradients with userbuffers.
    """
    if config.tp_comm_overlap:
        raise NotImplementedError(
            'tp_comm_overlap does not work with schedules that split the backward: Transformer '
            'Engine cannot delay weight gradients with userbuffers; drop --tp-comm-overlap'
        )
    config.delay_wgrad_compute = True


def delaying_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The TE modules in `model` that were built to delay their weight gradients.

    Raises:
        NotImplementedError: one of them keeps its weight in parts, or reduces it by itself.
    """
    modules = [
        module
        for module in model.modules()
        if getattr(module, 'wgrad_store', None) is not None
        and module.wgrad_store.delay_wgrad_compute()
    ]
    for module in modules:
        if len(getattr(module, 'weight_names', ())) > 1:
            raise NotImplementedError(
                f'{type(module).__name__} has its weight in the parts {module.weight_names}, whose '
                'delayed gradients Transformer Engine loses; build it without parameters_split'
            )
        if getattr(module, 'wgrad_accumulation_and_reduce_hooks', ()):
            raise NotImplementedError(
                'DistributedDataParallelConfig.delay_wgrad_compute does not work with schedules '
                'that split the backward, which delay by themselves; leave it out'
            )
    return modules


def queueing(modules: list[torch.nn.Module], store: WeightGradStore) -> AbstractContextManager:
    """Around a backward: what `modules` queue in it goes to `store`, in backward's order.

    Where the store does not defer, it is run at the end, at once.
    """
    return _queueing(modules, store) if modules else _NOTHING


@contextlib.contextmanager
def _queueing(modules: list[torch.nn.Module], store: WeightGradStore) -> Iterator[None]:
    before = [module.wgrad_store.context.qsize() for module in modules]
    made: set[torch.nn.Parameter] = set()
    with contextlib.ExitStack() as stack:
        for module in modules:
            for parameter in _weights_and_biases(module):
                stack.enter_context(_visited(parameter, made))
        yield
    runs = []
    for module, queued in zip(reversed(modules), reversed(before), strict=True):
        # LayerNormMLP queues two for each backward, and runs two
        entries = 2 if hasattr(module, 'fc2_weight') else 1
        runs += [module] * ((module.wgrad_store.context.qsize() - queued) // entries)
    if store.deferring:
        _defer(runs, store, made)
    elif runs:
        store.open(_AT_ONCE)
        with store.scope(_AT_ONCE):
            _defer(runs, store, made)
        store.run(_AT_ONCE)


def _defer(
    runs: list[torch.nn.Module], store: WeightGradStore, made: set[torch.nn.Parameter]
) -> None:
    for module in runs:
        parameters = _weights_and_biases(module)
        store.defer(parameters, functools.partial(_run_oldest, module, parameters, made))


@contextlib.contextmanager
def _visited(parameter: torch.nn.Parameter, made: set[torch.nn.Parameter]) -> Iterator[None]:
    """Around autograd's visit in B: notes in `made` that B computed a gradient for `parameter`.

    Where it did not, DistributedDataParallel sees one that it is told it need not add.
    """
    distributed = hasattr(parameter, _ADDED)
    added = getattr(parameter, _ADDED, False)

    def note(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            made.add(parameter)
        elif distributed:
            setattr(parameter, _ADDED, True)
            parameter.grad = _stand_in(parameter)

    handle = parameter.register_hook(note)
    try:
        yield
    finally:
        handle.remove()
        if distributed and parameter not in made:
            setattr(parameter, _ADDED, added)
            parameter.grad = None


def _weights_and_biases(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters whose gradients `backward_dw` computes; those of norms come with B."""
    return [
        parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and 'layer_norm' not in name
    ]


def _run_oldest(
    module: torch.nn.Module,
    parameters: list[torch.nn.Parameter],
    made: set[torch.nn.Parameter],
) -> list[torch.Tensor | None]:
    """Runs the oldest of the module's queue.

    Args:
        module: that queued it.
        parameters: its weights and biases.
        made: those that B has given a gradient: `backward_dw` leaves them alone.

    Returns:
        A gradient for each parameter. None where it came with B or is in `main_grad`; in its place
        a stand-in where DistributedDataParallel waits for one.
    """
    held = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = parameter.detach() if parameter in made else None
    module.backward_dw()
    gradients = [None if parameter in made else parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, held, strict=True):
        parameter.grad = gradient
    return [
        _stand_in(parameter) if gradient is None and hasattr(parameter, _ADDED) else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]


def _stand_in(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What DistributedDataParallel takes for a gradient, and adds where it is not told not to."""
    if getattr(parameter, _ADDED) and not getattr(parameter, 'zero_out_wgrad', False):
        return parameter.detach()  # costs nothing
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
