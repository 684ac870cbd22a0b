"""Checkpoints of pretrain_gpt.py: Megatron's own, saved, found, looked at before they are loaded.

A folder of them holds `iter_0000010` and so on, and the tracker file, which names the latest whole
one. The tracker is replaced at once, so that it names one whatever happens meanwhile.
"""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.utils import get_attr_wrapped_model
from torch.distributed.checkpoint import FileSystemReader

TRACKER = 'latest_checkpointed_iteration.txt'

# What a checkpoint must agree on with the model that it is loaded into.
SHAPE = (
    'num_layers',
    'hidden_size',
    'num_attention_heads',
    'seq_length',
    'position_embedding_type',
    'untie_embeddings_and_output_weights',
)


# what reading a damaged checkpoint raises
_UNREADABLE = (CheckpointingException, EOFError, OSError, RuntimeError, pickle.UnpicklingError)


class InputError(ValueError):
    """Something the user can set right: every rank says what, and stops."""


def save(
    args: argparse.Namespace, models: list[Any], optimizer: Any, scheduler: Any, iteration: int
) -> None:
    """Save under --save; the tracker file names the checkpoint once it is whole."""
    folder = _folder(args.save, iteration)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _state(models, optimizer, scheduler, loading=False)
    state |= {'iteration': iteration, 'shape': {key: getattr(args, key) for key in SHAPE}}
    dist_checkpointing.save(state, str(folder))
    if dist.get_rank() == 0:
        written = args.save / f'{TRACKER}.new'
        written.write_text(str(iteration))
        os.replace(written, args.save / TRACKER)
        print(f' saved checkpoint at iteration {iteration} to {args.save}', flush=True)
    dist.barrier()


def to_load(args: argparse.Namespace) -> Path | None:
    """Return the checkpoint to load, once it is known to be whole and of this model.

    That is the one of --ckpt-step, or the one that the tracker in --load names.

    Raises:
        InputError: none is there, it is damaged, or it is of another model.
    """
    if args.load is None:
        return None
    step = _tracked(args.load) if args.ckpt_step is None else args.ckpt_step
    folder = _folder(args.load, step)
    damage = _damage(folder)
    if damage is not None:
        raise InputError(f'{damage}; {_instead(args.load, step)}')
    shape = dist_checkpointing.load_common_state_dict(str(folder))['shape']
    other = [
        f'--{key.replace("_", "-")} was {shape[key]} and is {getattr(args, key)}'
        for key in SHAPE
        if shape[key] != getattr(args, key)
    ]
    if other:
        raise InputError(f'{folder} is a checkpoint of another model: ' + ', '.join(other))
    return folder


def load(folder: Path, models: list[Any], optimizer: Any, scheduler: Any) -> int:
    """Load in place; return the iteration after which it was saved.

    Raises:
        InputError: what is in its files cannot be read.
    """
    state = _state(models, optimizer, scheduler, loading=True)
    try:
        state = dist_checkpointing.load(state, str(folder))
    except _UNREADABLE as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        raise InputError(
            f'{folder} cannot be read ({reason}); {_instead(folder.parent)}'
        ) from error
    for i, model in enumerate(models):
        _unwrapped(model).load_state_dict(state[f'model{i}'])
    optimizer.load_state_dict(state['optimizer'])
    scheduler.load_state_dict(state['opt_param_scheduler'])
    return state['iteration']


def _state(models: list[Any], optimizer: Any, scheduler: Any, loading: bool) -> dict:
    """Return what is saved: sharded by global layer number, so that any placement can load it."""
    states = {f'model{i}': _unwrapped(m).sharded_state_dict() for i, m in enumerate(models)}
    metadata = {'distrib_optim_sharding_type': 'fully_reshardable'}
    return {
        **states,
        'optimizer': optimizer.sharded_state_dict(states, loading, metadata=metadata),
        'opt_param_scheduler': scheduler.state_dict(),
    }


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the chunk inside its wrappers."""
    return get_attr_wrapped_model(model, 'pre_process', return_model_obj=True)


def _folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return root / f'iter_{iteration:07d}'


def _tracked(root: Path) -> int:
    """Return the iteration that the tracker names.

    Raises:
        InputError: there is no tracker, or no number in it.
    """
    tracker = root / TRACKER
    if not tracker.exists():
        raise InputError(f'no checkpoint in --load {root}: {TRACKER} is not there')
    text = tracker.read_text(errors='replace').strip()
    if not (text.isascii() and text.isdigit()):
        raise InputError(f'{tracker} holds {text[:40]!r}, not an iteration; {_instead(root)}')
    return int(text)


def _damage(folder: Path) -> str | None:
    """Return what is missing of a checkpoint, as a sentence; None: nothing.

    What stands in them is not compared: neither torch nor Megatron keeps checksums.
    """
    for name in ('.metadata', 'metadata.json'):
        if not (folder / name).is_file():
            return f'{folder} is not whole: it has no {name}'
    try:
        entries = FileSystemReader(str(folder)).read_metadata().storage_data.values()
    except (EOFError, pickle.UnpicklingError) as error:
        return f'{folder / ".metadata"} is damaged ({error})'
    lengths: dict[str, int] = {}
    for entry in entries:
        end = entry.offset + entry.length
        lengths[entry.relative_path] = max(end, lengths.get(entry.relative_path, 0))
    for name, length in lengths.items():
        file = folder / name
        if not file.is_file():
            return f'{folder} is not whole: it has no {name}'
        if file.stat().st_size < length:
            return f'{file} is damaged: {file.stat().st_size} bytes, not {length}'
    try:
        dist_checkpointing.load_common_state_dict(str(folder))
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0]
        return f'{folder}: what is common to all ranks cannot be read ({reason})'
    return None


def _instead(root: Path, but: int | None = None) -> str:
    """Which other checkpoint can be loaded, as a clause."""
    newest = next((step for step in _steps(root) if step != but), None)
    if newest is None:
        return f'no other checkpoint in {root} is whole'
    return f'give --ckpt-step {newest} to go on from {_folder(root, newest).name}, which is whole'


def _steps(root: Path) -> Iterator[int]:
    """Yield iterations of the whole checkpoints in `root`, the latest first."""
    for folder in sorted(root.glob('iter_*'), reverse=True):
        number = folder.name.removeprefix('iter_')
        if number.isdigit() and _damage(folder) is None:
            yield int(number)
