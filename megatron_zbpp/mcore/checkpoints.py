"""Checkpoints whose content is kept by rank and chunk, of NVIDIA's training loop and of Bridge's.

Kept so are the format `torch` as a whole, whose files have a state dict a chunk with layers counted
from 0; the distributed optimizer's state in `torch_dist`, unless that is fully reshardable; and
local checkpoints. Such a file fits any chunk of as many layers, and does not say which of the
model's it holds. `RankFiles` says it: by what we have saved with it, or by its arguments. Where a
run has others on its ranks, all ranks refuse to load it, before any does. All else goes to any
schedule.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_model_config

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.placement import layers_per_stage, layout_string
from megatron_zbpp.mcore import layout
from megatron_zbpp.mcore.job.sizes import Sizes
from megatron_zbpp.mcore.patches.training_loop import placement_of
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import BY_BRIDGE, PLACING
from megatron_zbpp.runtime.guard import agreement

KEY = 'megatron_zbpp_layout'  # of a checkpoint's state dict
_RANKS = 'pipeline_model_parallel_size'  # what Megatron compares, too
# Megatron's arguments that tell which layers a rank has
_ARGUMENTS = (
    *PLACING,
    'num_layers',
    _RANKS,
    'virtual_pipeline_model_parallel_size',
    'mtp_num_layers',
    'hybrid_layer_pattern',
)
# what is kept by rank, and what else to do than to go on with the schedule that saved it
_BY_RANK = {
    'torch': (
        'a checkpoint of the format torch',
        'convert it: give that schedule --ckpt-convert-format torch_dist --ckpt-convert-save '
        'FOLDER, and load FOLDER',
    ),
    'torch_dist': (
        "the distributed optimizer's state in this checkpoint",
        'give --no-load-optim, or let that schedule save it with '
        '--dist-ckpt-optim-fully-reshardable',
    ),
    'torch_dist of Bridge': (
        "the distributed optimizer's state in this checkpoint",
        'set checkpoint.load_optim to False, or let that schedule save it with '
        'checkpoint.dist_ckpt_optim_fully_reshardable',
    ),
    'local': ('a local checkpoint', 'load a checkpoint that is not local'),
}


@dataclass(frozen=True)
class RankFiles:
    """Layers in the files of a checkpoint; equal where each file holds the same."""

    schedule: str  # who placed them
    # of each pipeline rank, of each of its chunks: as `E 1-2` or `7-8 L`, layers of the model
    # counted from 1, embedding and loss by their letters
    layers: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, schedule: str, placement: Placement, stages: Sequence[str]) -> RankFiles:
        """Return the files of stages, in model order, on their ranks; a stage is letters, as `Ett`.

        >>> RankFiles.of('zb-v', Placement.v(2), ['Et', 't', 't', 'tL']).layers
        (('E 1', '4 L'), ('2', '3'))
        """
        named, before = [], 0
        for stage in stages:
            named.append(_named(stage, before))
            before += len(stage.strip('EmL'))
        ranks = range(placement.num_ranks)
        return cls(schedule, tuple(tuple(named[s] for s in placement.stages(r)) for r in ranks))

    @classmethod
    def by_megatron(cls, args: Any) -> RankFiles:
        """Return the files of a run by one of Megatron's schedules, from its saved arguments."""
        chunks = getattr(args, 'virtual_pipeline_model_parallel_size', None) or 1
        placement = Placement.loop(args.pipeline_model_parallel_size, chunks)
        schedule = "Megatron's interleaved schedule" if chunks > 1 else "Megatron's 1F1B"
        return cls.of(schedule, placement, _stages(args, placement))

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> RankFiles | None:
        """Return the files that a checkpoint names; None: it has no layout and no arguments."""
        if (written := state.get(KEY)) is not None:
            return cls(written['schedule'], tuple(map(tuple, written['layers'])))
        args = state.get('args')
        return None if args is None else cls.by_megatron(args)

    def state(self) -> dict[str, Any]:
        return {'schedule': self.schedule, 'layers': [list(rank) for rank in self.layers]}

    def difference(self, other: RankFiles) -> str:
        """Name the layers of the first rank whose layers differ, by these files and by `other`.

        >>> stages = ['Et', 't', 't', 'tL']
        >>> loop = RankFiles.of('interleaved', Placement.loop(2, 2), stages)
        >>> loop.difference(RankFiles.of('zb-v', Placement.v(2), stages))
        'rank 0 holds layers E 1 | 3 by interleaved, but E 1 | 4 L by zb-v'
        """
        if len(self.layers) != len(other.layers):
            return (
                f'it has {len(self.layers)} pipeline ranks by {self.schedule}, but '
                f'{len(other.layers)} by {other.schedule}'
            )
        both = enumerate(zip(self.layers, other.layers, strict=True))
        rank, (own, others) = next((r, pair) for r, pair in both if pair[0] != pair[1])
        return (
            f'rank {rank} holds layers {" | ".join(own)} by {self.schedule}, but '
            f'{" | ".join(others)} by {other.schedule}'
        )


def _named(stage: str, before: int) -> str:
    """Return a stage's layers, as `E 1-2`, behind so many layers."""
    count = len(stage.strip('EmL'))
    numbers = f'{before + 1}' if count == 1 else f'{before + 1}-{before + count}' if count else ''
    mtp = f'm{stage.count("m")}' if 'm' in stage else ''
    words = ('E' if 'E' in stage else '', numbers, mtp, 'L' if 'L' in stage else '')
    return ' '.join(filter(None, words)) or 'none'


def _stages(args: Any, placement: Placement) -> list[str]:
    """Return the letters of each stage in model order, as `Ett`."""
    counts = Sizes(args).hybrid_layers()
    given = {_field(name): getattr(args, name, None) for name in _ARGUMENTS}
    if counts is None:
        if (stages := given['pipeline_model_parallel_layout']) is not None:
            return layout.text_of_stages(stages).split('|')
        if placement.is_loop:  # as Megatron divides layers without a layout
            chunks = placement.num_chunks if placement.num_chunks > 1 else None
            sizes = {_RANKS: placement.num_ranks, 'virtual_pipeline_model_parallel_size': chunks}
            return layout.text_by_config(SimpleNamespace(**given | sizes), placement).split('|')
        counts = [args.num_layers]  # the program has laid them out by itself
    if len(counts) != placement.num_stages:
        counts = layers_per_stage(sum(counts), placement)
    return layout_string(counts, given['mtp_num_layers'] or 0).split('|')


def with_layout(
    session: Session, original: Callable, args: Any, *more: Any, **named: Any
) -> dict[str, Any]:
    """Write down which layers each rank has; in a V also where Megatron compares, without us."""
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


def looking_inside(session: Session, original: Callable, checkpoint_name: str, args: Any) -> str:
    """Compare a checkpoint of the format `torch` with this run, before a rank reads its file."""
    found = original(checkpoint_name, args)
    here = _here(session, args)
    if found == 'torch' and here is not None:
        require_same(session, here, checkpoint_name, found, _read_any(checkpoint_name))
    return found


def comparing(
    session: Session, original: Callable, load_dir: Any, args: Any, *more: Any, **named: Any
) -> tuple:
    """Compare the layers that are kept by rank when a checkpoint is first read."""
    loaded = state, name, release, kind = original(load_dir, args, *more, **named)
    here = _here(session, args)
    if not state or here is None:
        return loaded
    saved = state.get('args')
    if named.get('rank0') and not release:
        loads = args.use_distributed_optimizer and not (args.no_load_optim or args.finetune)
        loads = loads and not getattr(saved, 'no_save_optim', False)
        fully_parallel = getattr(saved, 'ckpt_fully_parallel_save', False)
        local = args.non_persistent_local_ckpt_dir if kind.name == 'LOCAL' else None
        kept = _kept_by_rank(kind.name, loads, state, fully_parallel)
        require_same(session, here, str(local or name or load_dir), kept, state)
    if isinstance(getattr(saved, _RANKS, None), str):
        setattr(saved, _RANKS, len(here.layers))
    return loaded


def comparing_in_bridge(
    session: Session, original: Callable, load_dir: Any, ckpt_cfg: Any, *more: Any, **named: Any
) -> tuple:
    """Compare the layers that are kept by rank when a checkpoint is first read."""
    loaded = state, name, release, kind = original(load_dir, ckpt_cfg, *more, **named)
    if not state or not named.get('rank0') or release:
        return loaded
    config = named['cfg']
    here = _here_in_bridge(session, getattr(config.model, 'transformer', config.model))
    if here is None:
        return loaded
    asked = config.checkpoint
    loads = config.optimizer.use_distributed_optimizer and asked.load_optim and not asked.finetune
    saved: Mapping[str, Any] = {}
    if kind.name == 'GLOBAL' and loads:
        utils = importlib.import_module('megatron.bridge.training.utils.checkpoint_utils')
        file = utils.get_checkpoint_run_config_filename(name)
        # a collective of all ranks
        saved = utils.read_run_config(file) if utils.file_exists(file) else {}
        if 'model' in saved and 'args' not in state:
            state = {**state, 'args': _arguments(saved['model'].get)}
    how = saved.get('checkpoint', {})
    loads = loads and how.get('save_optim') is not False
    kept = _kept_by_rank(kind.name, loads, state, bool(how.get('fully_parallel_save')))
    kept = 'torch_dist of Bridge' if kept == 'torch_dist' else kept
    require_same(session, here, str(name), kept, state)
    return loaded


def _kept_by_rank(
    kind: str, loads: bool, state: Mapping[str, Any], fully_parallel: bool
) -> str | None:
    """Return the part of a checkpoint that is kept by rank; None: no part that is loaded."""
    if kind == 'LOCAL':
        return 'local'
    if kind != 'GLOBAL' or not loads:
        return None
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=dict(state))
    if metadata is None:  # releases before 0.13 do not say it there
        return None if fully_parallel else 'torch_dist'
    by_layer = DistributedOptimizer.checkpoint_fully_reshardable_formats
    return None if metadata['distrib_optim_sharding_type'] in by_layer else 'torch_dist'


def require_same(
    session: Session, here: RankFiles, name: str, kept: str | None, state: Mapping[str, Any] | str
) -> None:
    """Raise ValueError on all ranks unless each has the layers that are kept for it: a collective.

    Where nothing is kept by rank, all ranks know that, and this does nothing.
    """
    if kept is None:
        return
    saved, reason = (None, state) if isinstance(state, str) else (RankFiles.saved(state), '')
    if not reason and (saved is None or saved.layers != here.layers):
        why = (saved and saved.difference(here)) or 'it does not say by which schedule it was saved'
        part, cure = _BY_RANK[kept]
        reason = f'{part} is kept by rank and chunk, and {why}: go on with the schedule that saved '
        reason += f'it, or {cure}'
    with session.watchdog.collective('whose layers a checkpoint has'):
        reasons = agreement.reasons(reason)
    if reasons:
        raise ValueError(f'{name} cannot be loaded: {reasons[0]}')


def _read_any(folder: str) -> Mapping[str, Any] | str:
    file = next(iter(sorted(Path(folder).glob('mp_rank_*/model_optim_rng.pt'))), None)
    if file is None:
        return 'it has no file mp_rank_*/model_optim_rng.pt'
    try:
        return torch.load(file, map_location='cpu', mmap=zipfile.is_zipfile(file))
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        return f'{file} cannot be read ({str(error).splitlines()[0]})'


def _here(session: Session, args: Any) -> RankFiles | None:
    """Return the layers that this run has on its ranks; None: no pipeline, or none so far."""
    placement = placement_of(session)
    if placement is None:
        return None
    return RankFiles.of(session.programs.source.name, placement, _stages(args, placement))


def with_bridge_layout(
    session: Session, original: Callable, ckpt_cfg: Any, model: Any, *more: Any, **named: Any
) -> dict[str, Any]:
    state = original(ckpt_cfg, model, *more, **named)
    files = _here_in_bridge(session, get_model_config(model[0]))
    return state if files is None else state | {KEY: files.state()}


def _here_in_bridge(session: Session, model: Any) -> RankFiles | None:
    return _here(session, _arguments(lambda field: getattr(model, field, None)))


def _arguments(setting: Callable[[str], Any]) -> Namespace:
    """Return Megatron's arguments for the settings of a model of Bridge's."""
    values = {name: setting(_field(name)) for name in _ARGUMENTS}
    given = values['pipeline_model_parallel_layout']
    values['pipeline_model_parallel_layout'] = getattr(given, 'input_data', given)
    return Namespace(**values)


def _field(argument: str) -> str:
    """Return the name that one of Megatron's arguments has in a config and in Bridge."""
    return BY_BRIDGE.of(argument).removeprefix('model.')
