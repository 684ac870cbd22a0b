"""Older versions of the weights in checkpoints of Megatron's own format.

Each parameter that a checkpoint has is there again for each older version, by the same layout and
another name: so any number of ranks can load it, and Megatron alone loads the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.runtime.versions import Slots

KEY = 'megatron_zbpp_older_weights'  # of a state dict; names of tensors begin with it
_MODULE = 'megatron.core.dist_checkpointing.serialization'


def patches(endless: EndlessTraining) -> Iterator[Patch]:
    """Yield what saves and loads distributed checkpoints."""
    for name, wrap in (('save', _saving), ('load', _loading)):
        yield Patch(_MODULE, name, functools.partial(wrap, endless), everywhere=True)


def _saving(endless: EndlessTraining, original: Callable) -> Callable:
    @functools.wraps(original)
    def save(sharded_state_dict: dict[str, Any], *more: Any, **named: Any) -> Any:
        versions = endless.versions
        if isinstance(versions, Slots):
            older = {
                str(age): _renamed(sharded_state_dict, age, versions.older(age))
                for age in range(1, versions.ages + 1)
            }
            sharded_state_dict = {**sharded_state_dict, KEY: older}
        return original(sharded_state_dict, *more, **named)

    return save


def _loading(endless: EndlessTraining, original: Callable) -> Callable:
    @functools.wraps(original)
    def load(
        sharded_state_dict: dict[str, Any], checkpoint_dir: str, *more: Any, **named: Any
    ) -> Any:
        parameters = [each.data for each in _sharded(sharded_state_dict)]
        ages = _ages(checkpoint_dir) if parameters else 0
        if not ages:
            job_log.info(
                '%s has no older weights: versions are equal at first, as where a training begins',
                checkpoint_dir,
            )
            return original(sharded_state_dict, checkpoint_dir, *more, **named)
        empty = {id(p): torch.empty_like(p.data) for p in parameters}
        older = {str(age): _renamed(sharded_state_dict, age, empty) for age in range(1, ages + 1)}
        asked = {**sharded_state_dict, KEY: older}
        found = original(asked, checkpoint_dir, *more, **named)
        loaded = (found[0] if isinstance(found, tuple) else found).pop(KEY)
        endless.loaded = [
            {id(p): loaded[str(age)][str(at)] for at, p in enumerate(parameters)}
            for age in range(1, ages + 1)
        ]
        return found

    return load


def _ages(checkpoint_dir: str) -> int:
    """Return how many older versions a checkpoint has."""
    names = serialization.load_tensors_metadata(checkpoint_dir)
    ages = {name.split('.')[1] for name in names if name.startswith(f'{KEY}.')}
    return max(map(int, ages), default=0)


def _sharded(state: dict[str, Any]) -> list[Any]:
    """Return what describes parameters, not optimizer state."""
    found = (v for v in nested_values(state) if hasattr(v, 'key'))
    return [v for v in found if isinstance(getattr(v, 'data', None), torch.nn.Parameter)]


def _renamed(state: dict[str, Any], age: int, weights: dict[int, torch.Tensor]) -> dict[str, Any]:
    """Return what describes parameters, by other names and with other weights.

    Args:
        state: a sharded state dict.
        age: of the weights, in steps.
        weights: by identity of the parameters.
    """
    return {
        str(at): replace(each, key=f'{KEY}.{age}.{each.key}', data=weights[id(each.data)])
        for at, each in enumerate(_sharded(state))
        if id(each.data) in weights
    }
