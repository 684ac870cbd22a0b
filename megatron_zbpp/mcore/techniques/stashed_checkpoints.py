"""Tensors that versions of the weights keep, in checkpoints of Megatron's own format.

Each parameter that a checkpoint has is there again for each older version, or for the average step
that corrects it, by the same layout and another name: so any number of ranks can load it, and
Megatron alone loads the rest. Beside them is how many steps were taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values

from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.log import job_log

KEY = 'megatron_zbpp_older_weights'  # of a state dict; names of tensors begin with it
_STEPS = 'steps'
_MODULE = 'megatron.core.dist_checkpointing.serialization'


def patches(endless: EndlessTraining) -> Iterator[Patch]:
    """Yield what saves and loads distributed checkpoints."""
    for name, wrap in (('save', _saving), ('load', _loading)):
        yield Patch(_MODULE, name, functools.partial(wrap, endless), everywhere=True)


def _saving(endless: EndlessTraining, original: Callable) -> Callable:
    @functools.wraps(original)
    def save(sharded_state_dict: dict[str, Any], *more: Any, **named: Any) -> Any:
        kept = endless.versions.kept() if endless.versions is not None else {}
        ours: dict[str, Any] = {
            name: _renamed(sharded_state_dict, name, tensors) for name, tensors in kept.items()
        }
        asked = {**sharded_state_dict, KEY: {**ours, _STEPS: endless.steps}}
        return original(asked, *more, **named)

    return save


def _loading(endless: EndlessTraining, original: Callable) -> Callable:
    @functools.wraps(original)
    def load(
        sharded_state_dict: dict[str, Any], checkpoint_dir: str, *more: Any, **named: Any
    ) -> Any:
        sharded = _sharded(sharded_state_dict)
        if not sharded:
            return original(sharded_state_dict, checkpoint_dir, *more, **named)
        parameters = [id(each.data) for each in sharded]  # which loading takes from them
        written: dict[str, Any] = serialization.load_tensors_metadata(checkpoint_dir)
        names = {name.split('.')[1] for name in written if name.startswith(f'{KEY}.')}
        ours = {}
        for name in sorted(names):
            tensors = {
                id(each.data): torch.empty_like(each.data, dtype=written[key].dtype)
                for each in sharded
                if (key := f'{KEY}.{name}.{each.key}') in written
            }
            ours[name] = _renamed(sharded_state_dict, name, tensors)
        found = original({**sharded_state_dict, KEY: ours}, checkpoint_dir, *more, **named)
        loaded = (found[0] if isinstance(found, tuple) else found).pop(KEY, {})
        if not names:
            job_log.info(
                '%s has no older weights: versions are equal at first, as where a training begins',
                checkpoint_dir,
            )
        endless.resume(loaded.get(_STEPS, 0))
        endless.loaded = {
            name: {
                parameter: loaded[name][str(at)]
                for at, parameter in enumerate(parameters)
                if str(at) in loaded[name]
            }
            for name in ours
        }
        return found

    return load


def _sharded(state: dict[str, Any]) -> list[Any]:
    found = (v for v in nested_values(state) if hasattr(v, 'key'))
    return [v for v in found if isinstance(getattr(v, 'data', None), torch.nn.Parameter)]


def _renamed(
    state: dict[str, Any], name: str, tensors: Mapping[int, torch.Tensor]
) -> dict[str, Any]:
    return {
        str(at): replace(
            each,
            key=f'{KEY}.{name}.{each.key}',
            data=(own := tensors[id(each.data)]),
            dtype=own.dtype,
        )
        for at, each in enumerate(_sharded(state))
        if id(each.data) in tensors
    }
