"""Checkpoints of Megatron-Bridge whose content is kept by rank and chunk.

As `training_checkpoints` does in NVIDIA's loop: a checkpoint saved by us says which layers each
rank holds; of one saved by Megatron's own schedules, the configuration beside it does. Weights and
adapters are kept by the layers' numbers, the distributed optimizer's state by rank, unless it is
fully reshardable.
"""

from __future__ import annotations

import functools
import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.utils import get_model_config

from megatron_zbpp.mcore.checkpoints import training_checkpoints
from megatron_zbpp.mcore.checkpoints.non_reshardable_files import KEY, RankFiles
from megatron_zbpp.mcore.layout import BRIDGE_FIELDS
from megatron_zbpp.mcore.patches.training_loop import placement_of
from megatron_zbpp.mcore.session import Session

_CURES = {
    **training_checkpoints.CURES,
    'torch_dist': (
        f'{training_checkpoints.GO_ON}, or set checkpoint.load_optim to False, or let that '
        'schedule save it with checkpoint.dist_ckpt_optim_fully_reshardable'
    ),
}
_SAME = (
    'num_layers',
    'pipeline_model_parallel_size',
    'virtual_pipeline_model_parallel_size',
    'mtp_num_layers',
    'hybrid_layer_pattern',
)
# Megatron's arguments that tell which layers a rank has, by their names in Bridge
_FIELDS = {**BRIDGE_FIELDS, **dict(zip(_SAME, _SAME, strict=True))}


def with_layout(session: Session, original: Callable) -> Callable:
    """Write down which layers each rank has."""

    @functools.wraps(original)
    def generate_state_dict(ckpt_cfg: Any, model: Any, *more: Any, **named: Any) -> dict[str, Any]:
        state = original(ckpt_cfg, model, *more, **named)
        files = _here(session, get_model_config(model[0]))
        return state if files is None else state | {KEY: files.state()}

    return generate_state_dict


def comparing(session: Session, original: Callable) -> Callable:
    """Compare the layers that are kept by rank when a checkpoint is first read."""

    @functools.wraps(original)
    def _load_base_checkpoint(load_dir: Any, ckpt_cfg: Any, *more: Any, **named: Any) -> tuple:
        state, name, release, kind = original(load_dir, ckpt_cfg, *more, **named)
        if not state or not named.get('rank0') or release:
            return state, name, release, kind
        config = named['cfg']
        here = _here(session, getattr(config.model, 'transformer', config.model))
        if here is not None:
            kept, saved = _kept_by_rank(state, config, name, kind.name)
            if kept is not None:
                training_checkpoints.require_same(session, here, str(name), kept, saved, _CURES)
        return state, name, release, kind

    return _load_base_checkpoint


def _kept_by_rank(
    state: Mapping[str, Any], config: Any, name: Any, kind: str
) -> tuple[str | None, Mapping[str, Any]]:
    """Return files of a checkpoint that are kept by rank, and the file that names their layers."""
    if kind == 'LOCAL':
        return 'local', state
    asked = config.checkpoint
    loads = config.optimizer.use_distributed_optimizer and asked.load_optim and not asked.finetune
    if kind != 'GLOBAL' or not loads:
        return None, state
    saved = _saved_config(name)
    how = saved.get('checkpoint', {})
    if how.get('save_optim') is False:
        return None, state
    by_layer = training_checkpoints.optimizer_is_by_layer(
        state, bool(how.get('fully_parallel_save'))
    )
    if 'model' in saved and 'args' not in state:
        state = {**state, 'args': _arguments(saved['model'])}
    return None if by_layer else 'torch_dist', state


def _saved_config(name: Any) -> Mapping[str, Any]:
    """Return the configuration beside a checkpoint: a collective of all ranks. Empty: none is."""
    utils = importlib.import_module('megatron.bridge.training.utils.checkpoint_utils')
    file = utils.get_checkpoint_run_config_filename(name)
    return utils.read_run_config(file) if utils.file_exists(file) else {}


def _arguments(model: Mapping[str, Any]) -> Namespace:
    values = {name: model.get(field) for name, field in _FIELDS.items()}
    layout = values['pipeline_model_parallel_layout']
    values['pipeline_model_parallel_layout'] = getattr(layout, 'input_data', layout)
    return Namespace(**values)


def _here(session: Session, model: Any) -> RankFiles | None:
    """Return the layers that this run has on its ranks; None: there is no pipeline, or not yet."""
    placement = placement_of(session)
    if placement is None:
        return None
    values = {field: getattr(model, field, None) for field in _FIELDS.values()}
    return RankFiles.by_plugin(session.programs.source.name, placement, _arguments(values))
