"""Aliases of weights and biases: leaves that share their memory, which modules find instead."""

from __future__ import annotations

from typing import Any

import torch

READ = 'main_grad', 'overwrite_main_grad'  # of a weight, by TE's modules


class Aliased:
    """While it is entered, a module's parameters are what is `shown`.

    A class: of a generator the entering alone takes longer than all of this.
    """

    __slots__ = ('_attributes', '_parameters', '_shown')

    def __init__(self, attributes: dict[str, Any], shown: dict[str, Any]) -> None:
        self._attributes = attributes
        self._shown = shown

    def __enter__(self) -> None:
        self._parameters = self._attributes['_parameters']
        self._attributes['_parameters'] = self._shown

    def __exit__(self, *_: object) -> None:
        self._attributes['_parameters'] = self._parameters


def alias_of(parameter: torch.nn.Parameter, soiled: bool) -> torch.Tensor:
    """Return a leaf with the memory of `parameter`.

    Of a quantized one it has all attributes, too, which come and go with its data; Transformer
    Engine then sees the flag of DistributedDataParallel, and gives autograd a stand-in.

    Args:
        parameter: a weight or a bias.
        soiled: whether autograd gets for it what is no gradient, to be kept and not copied.
    """
    alias: Any = parameter.detach().requires_grad_()
    if type(alias) is torch.Tensor:
        for name in READ:
            if hasattr(parameter, name):
                setattr(alias, name, getattr(parameter, name))
    else:
        alias.__dict__ = parameter.__dict__
    if soiled:
        alias.register_hook(_unshared)
    return alias


def _unshared(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor that nobody else has, which autograd keeps and does not copy."""
    return None if gradient is None else gradient.detach()
