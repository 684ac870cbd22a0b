"""Transformer Engine's linear modules: their own queue of weight gradients, run by our W passes.

A TE module built with `delay_wgrad_compute` puts the computation of its weight gradient into a
queue of its own (`wgrad_store`) and runs the oldest entry on `backward_dw()`. Weight gradients of a
stage come in microbatch order, so first in, first out is what a W pass needs. `backward_dw`
overwrites `.grad`, or adds to `main_grad` when fused: what it leaves in `.grad` goes to autograd.

Not run by the tests of a machine without a GPU, where TE's modules cannot run.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_zbpp.runtime.store import WeightGradStore


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
    """The TE modules in `model` that were built to delay their weight gradients."""
    return [
        module
        for module in model.modules()
        if getattr(module, 'wgrad_store', None) is not None
        and module.wgrad_store.delay_wgrad_compute()
    ]


def defer_queued(modules: list[torch.nn.Module], store: WeightGradStore) -> None:
    """Hands the weight gradients that this B has queued over to `store`, in backward's order."""
    for module in reversed(modules):
        if not module.wgrad_store.context.empty():
            parameters = _weights_and_biases(module)
            store.defer(parameters, functools.partial(_run_oldest, module, parameters))


def _weights_and_biases(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters whose gradients `backward_dw` computes; those of norms come with B."""
    return [
        parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and 'layer_norm' not in name
    ]


def _run_oldest(
    module: torch.nn.Module, parameters: list[torch.nn.Parameter]
) -> list[torch.Tensor | None]:
    """Runs the oldest entry of the module's queue; None where it was added to `main_grad`."""
    held = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    module.backward_dw()
    gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, held, strict=True):
        parameter.grad = gradient
    return gradients
