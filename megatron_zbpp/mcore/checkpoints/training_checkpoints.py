"""Checkpoints whose content is kept by rank and chunk, in NVIDIA's training loop.

Saved by us, one says which layers its files hold; saved by Megatron, its arguments tell. Where a
run has others on its ranks, all ranks refuse to load it, before any does.

Three things are kept so: the format `torch` as a whole; the distributed optimizer's state in the
format `torch_dist`, unless that is fully reshardable; and local checkpoints. All else of
`torch_dist` is kept by the layers' numbers in the model, and goes to any schedule.
"""

from __future__ import annotations

import copy
import functools
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_zbpp.mcore.checkpoints.non_reshardable_files import KEY, RankFiles
from megatron_zbpp.mcore.patches.training_loop import placement_of
from megatron_zbpp.mcore.session import Session

_RANKS = 'pipeline_model_parallel_size'  # what Megatron compares, too
GO_ON = 'go on with the schedule that saved it'
CURES = {
    'torch': (
        f'{GO_ON}, or convert it: give that schedule --ckpt-convert-format torch_dist '
        '--ckpt-convert-save FOLDER, and load FOLDER'
    ),
    'torch_dist': (
        f'{GO_ON}, or give --no-load-optim, or let that schedule save it with '
        '--dist-ckpt-optim-fully-reshardable'
    ),
    'local': f'{GO_ON}, or load a checkpoint that is not local',
}
_WHAT = {
    'torch': 'a checkpoint of the format torch',
    'torch_dist': "the distributed optimizer's state in this checkpoint",
    'local': 'a local checkpoint',
}


def with_layout(session: Session, original: Callable) -> Callable:
    """Write down which layers each rank has.

    In a V, files of the format `torch` also say it where Megatron compares, so that it refuses
    them without us.
    """

    @functools.wraps(original)
    def generate_state_dict(args: Any, *more: Any, **named: Any) -> dict[str, Any]:
        state = original(args, *more, **named)
        files = _here(session, args)
        if files is None:
            return state
        state[KEY] = files.state()
        placement = placement_of(session)
        if args.ckpt_format == 'torch' and placement is not None and not placement.is_loop:
            state['args'] = copy.copy(args)
            where = f'as {files.schedule} of megatron_zbpp places them, which alone can load it'
            setattr(state['args'], _RANKS, f'{len(files.layers)}, {where}')
        return state

    return generate_state_dict


def looking_inside(session: Session, original: Callable) -> Callable:
    """Compare a checkpoint of the format `torch` with this run, before a rank reads its file."""

    @functools.wraps(original)
    def _get_checkpoint_format(checkpoint_name: str, args: Any) -> str:
        found = original(checkpoint_name, args)
        here = _here(session, args)
        if found == 'torch' and here is not None:
            require_same(session, here, checkpoint_name, found, _read_any(checkpoint_name))
        return found

    return _get_checkpoint_format


def comparing(session: Session, original: Callable) -> Callable:
    @functools.wraps(original)
    def _load_base_checkpoint(load_dir: Any, args: Any, *more: Any, **named: Any) -> tuple:
        state, name, release, kind = original(load_dir, args, *more, **named)
        here = _here(session, args)
        if not state or here is None:
            return state, name, release, kind
        kept = _kept_by_rank(state, args, kind.name) if named.get('rank0') and not release else None
        if kept is not None:
            where = args.non_persistent_local_ckpt_dir if kept == 'local' else name or load_dir
            require_same(session, here, str(where), kept, state)
        if isinstance(getattr(state.get('args'), _RANKS, None), str):
            setattr(state['args'], _RANKS, len(here.layers))
        return state, name, release, kind

    return _load_base_checkpoint


def _kept_by_rank(state: Mapping[str, Any], args: Any, kind: str) -> str | None:
    if kind == 'LOCAL':
        return 'local'
    loads = args.use_distributed_optimizer and not (args.no_load_optim or args.finetune)
    saved = state.get('args')
    if kind != 'GLOBAL' or not loads or getattr(saved, 'no_save_optim', False):
        return None
    fully_parallel = getattr(saved, 'ckpt_fully_parallel_save', False)
    return None if optimizer_is_by_layer(state, fully_parallel) else 'torch_dist'


def optimizer_is_by_layer(state: Mapping[str, Any], fully_parallel: bool) -> bool:
    """Return whether the distributed optimizer's state in a checkpoint goes to any placement.

    Args:
        state: what is common to all ranks.
        fully_parallel: how releases before 0.13 saved it, which do not say it there.
    """
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=dict(state))
    if metadata is None:
        return fully_parallel
    by_layer = DistributedOptimizer.checkpoint_fully_reshardable_formats
    return metadata['distrib_optim_sharding_type'] in by_layer


def require_same(
    session: Session,
    here: RankFiles,
    name: str,
    kept: str,
    state: Mapping[str, Any] | str,
    cures: Mapping[str, str] = CURES,
) -> None:
    """Raise unless each rank has the layers that are kept for it: a collective of all ranks.

    Raises:
        ValueError: some has others, or it is not known; on all ranks.
    """
    if isinstance(state, str):
        reason = state
    else:
        saved = RankFiles.saved(state)
        reason = (
            ''
            if saved is not None and saved.same_layers(here)
            else _refusal(saved, here, kept, cures[kept])
        )
    reasons = [''] * dist.get_world_size()
    with session.watchdog.collective('whose layers a checkpoint has'):
        dist.all_gather_object(reasons, reason)
    found = next(filter(None, reasons), None)
    if found is not None:
        raise ValueError(f'{name} cannot be loaded: {found}')


def _refusal(saved: RankFiles | None, here: RankFiles, kept: str, cure: str) -> str:
    why = (
        'it does not say by which schedule it was saved'
        if saved is None
        else saved.difference(here)
    )
    return f'{_WHAT[kept]} is kept by rank and chunk, and {why}: {cure}'


def _read_any(folder: str) -> Mapping[str, Any] | str:
    file = next(iter(sorted(Path(folder).glob('mp_rank_*/model_optim_rng.pt'))), None)
    if file is None:
        return 'it has no file mp_rank_*/model_optim_rng.pt'
    try:
        return torch.load(file, map_location='cpu', mmap=zipfile.is_zipfile(file))
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        return f'{file} cannot be read ({str(error).splitlines()[0]})'


def _here(session: Session, args: Any) -> RankFiles | None:
    """Return the layers that this run has on its ranks; None: there is no pipeline, or not yet."""
    placement = placement_of(session)
    if placement is None:
        return None
    return RankFiles.by_plugin(session.programs.source.name, placement, args)
