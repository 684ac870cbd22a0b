"""Checkpoints of pretrain_gpt.py: Megatron's own, saved, found, looked at before they are loaded.

A folder of them holds `iter_0000010` and so on, and the tracker file, which names the latest whole
one. The tracker is replaced at once, so that it names one whatever happens meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_attr_wrapped_model
from torch.distributed.checkpoint import FileSystemReader

TRACKER = 'latest_checkpointed_iteration.txt'
SUMS = 'sha256.json'  # of the files of a checkpoint, beside them
_BLOCK = 2**20  # bytes

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
    dist.barrier()
    sums = _sums(folder)
    if dist.get_rank() == 0:
        (folder / SUMS).write_text(json.dumps(sums, indent=1))
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
    try:
        shape = _common_state(folder)['shape']
    except InputError as damage:
        raise InputError(f'{damage}; {_instead(args.load, step)}') from damage
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
        InputError: what is in its files cannot be read, or is not what was saved.
    """
    instead = _instead(folder.parent, but=int(folder.name.removeprefix('iter_')))
    altered = _altered(folder)
    if altered:
        raise InputError(f'{folder / altered[0]} is damaged: not what was saved; {instead}')
    state = _state(models, optimizer, scheduler, loading=True)
    try:
        state = dist_checkpointing.load(state, str(folder))
    except _UNREADABLE as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        raise InputError(f'{folder} cannot be read ({reason}); {instead}') from error
    for i, model in enumerate(models):
        _unwrapped(model).load_state_dict(state[f'model{i}'])
    _load_optimizer(optimizer, state['optimizer'])
    scheduler.load_state_dict(state['opt_param_scheduler'])
    return state['iteration']


def _state(models: list[Any], optimizer: Any, scheduler: Any, loading: bool) -> dict:
    """Return what is saved: sharded by global layer number, so that any placement can load it."""
    if loading:
        _begin_steps(optimizer)
    states = {f'model{i}': _unwrapped(m).sharded_state_dict() for i, m in enumerate(models)}
    metadata = {'distrib_optim_sharding_type': 'fully_reshardable'}
    return {
        **states,
        'optimizer': optimizer.sharded_state_dict(states, loading, metadata=metadata),
        'opt_param_scheduler': scheduler.state_dict(),
    }


def _begin_steps(optimizer: Any) -> None:
    """Make the state of torch's Adam under Megatron's distributed optimizer, at step 0.

    Megatron asks it for its step before anything is loaded, when it has none.
    """
    leaf = _on_torch_adam(optimizer)
    for group in leaf.optimizer.param_groups if leaf else ():
        for parameter in group['params']:
            state = leaf.optimizer.state[parameter]
            for name in ('exp_avg', 'exp_avg_sq'):
                state.setdefault(name, torch.zeros_like(parameter))
            state.setdefault('step', torch.zeros(()))


def _load_optimizer(optimizer: Any, state: dict) -> None:
    """Load the state of an optimizer, with steps of torch's Adam.

    Beside tensors of the size of a parameter Megatron does not expect them, and it gives all
    parameters the same one, which each would count up.
    """
    leaf = _on_torch_adam(optimizer)
    if leaf is None:
        optimizer.load_state_dict(state)
        return
    of_parameters = state.pop('param_state')
    leaf.load_state_dict(state)
    states = leaf.optimizer.state.values()
    steps = [each.pop('step') for each in states]
    leaf.load_parameter_state_from_fully_reshardable(of_parameters)
    for each, step in zip(states, steps, strict=True):
        each['step'] = step.clone()


def _on_torch_adam(optimizer: Any) -> Any | None:
    """Return the distributed optimizer, where what steps in it is torch's own Adam; else None.

    Megatron's loop does not meet it: it needs Apex or Transformer Engine there.
    """
    (leaf,) = optimizer.chained_optimizers
    adam = isinstance(leaf.optimizer, torch.optim.Adam)
    return leaf if adam and isinstance(leaf, DistributedOptimizer) else None


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


def _common_state(folder: Path) -> dict[str, Any]:
    """Return what a whole checkpoint has of all ranks together.

    What stands in its files is compared when it is loaded, by all ranks together.

    Raises:
        InputError: something of it is missing, or cannot be read.
    """
    for name in ('.metadata', 'metadata.json'):
        if not (folder / name).is_file():
            raise InputError(f'{folder} is not whole: it has no {name}')
    for name, length in _lengths(folder).items():
        file = folder / name
        if not file.is_file():
            raise InputError(f'{folder} is not whole: it has no {name}')
        if file.stat().st_size < length:
            raise InputError(f'{file} is damaged: {file.stat().st_size} bytes, not {length}')
    try:
        return dist_checkpointing.load_common_state_dict(str(folder))
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f'{folder}: what is common to all ranks cannot be read ({reason})'
        ) from error


def _lengths(folder: Path) -> dict[str, int]:
    """Return how many bytes each file of a checkpoint has at least, by its name.

    Raises:
        InputError: the file that says so is damaged.
    """
    try:
        entries = FileSystemReader(str(folder)).read_metadata().storage_data.values()
    except (EOFError, pickle.UnpicklingError) as error:
        raise InputError(f'{folder / ".metadata"} is damaged ({error})') from error
    lengths: dict[str, int] = {}
    for entry in entries:
        end = entry.offset + entry.length
        lengths[entry.relative_path] = max(end, lengths.get(entry.relative_path, 0))
    return lengths


def _sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file: a collective, in which each rank reads its share."""
    names = sorted(f.name for f in folder.iterdir() if f.is_file() and f.name != SUMS)
    share = names[dist.get_rank() :: dist.get_world_size()]
    everywhere: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, {name: _sum(folder / name) for name in share})
    return {name: digest for own in everywhere for name, digest in own.items()}


def _sum(file: Path) -> str:
    digest = sha256()
    with file.open('rb') as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _altered(folder: Path) -> list[str]:
    """Return the files of a checkpoint whose content is not what was saved: a collective.

    None, where another program has saved it: neither torch nor Megatron keeps checksums.
    """
    if not (folder / SUMS).is_file():
        return []
    try:
        saved = dict(json.loads((folder / SUMS).read_text()))
    except ValueError:
        return [SUMS]
    found = _sums(folder)
    return [name for name, digest in saved.items() if found.get(name) != digest]


def _instead(root: Path, but: int | None = None) -> str:
    """Which other checkpoint can be loaded, as a clause."""
    newest = next((step for step in _steps(root) if step != but), None)
    if newest is None:
        return f'no other checkpoint in {root} is whole'
    return f'give --ckpt-step {newest} to go on from {_folder(root, newest).name}, which is whole'


def _steps(root: Path) -> Iterator[int]:
    """Yield iterations of the whole checkpoints in `root`, the latest first."""
    for folder in sorted(root.glob('iter_*'), reverse=True):
        step = _step(folder)
        if step is None:
            continue
        try:
            _common_state(folder)
        except InputError:  # said where this one is asked for
            continue
        yield step


def _step(folder: Path) -> int | None:
    """Return the iteration of a checkpoint by its name; None: it has another."""
    number = folder.name.removeprefix('iter_')
    return int(number) if number.isdigit() else None
