"""What pretrain_gpt.py tells: Megatron's log line, exact metrics, fingerprints, timelines."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model


def is_reporter() -> bool:
    """Return the last process: it has the loss, and Megatron logs there."""
    return dist.get_rank() == dist.get_world_size() - 1


def write_line(path: Path | None, line: dict) -> None:
    """Append a JSON line to `path`, where there is one, on the reporting rank."""
    if path is not None and is_reporter():
        with path.open('a') as file:
            file.write(json.dumps(line) + '\n')


def figures_due(args: argparse.Namespace, iteration: int, meter: Any) -> Any | None:
    """Of the pipeline since the last log line, where one is due: a collective of its ranks."""
    return meter.figures() if iteration % args.log_interval == 0 else None


def log(
    args: argparse.Namespace,
    iteration: int,
    seconds: float,
    lr: float,
    loss: float,
    grad_norm: float | None,
    skipped: int,
    figures: Any | None,
) -> None:
    """Megatron's log line, and the exact values for --metrics-file."""
    grad_norm = 0.0 if grad_norm is None else float(grad_norm)
    exact = {'loss': loss.hex(), 'grad_norm': grad_norm.hex(), 'lr': lr.hex(), 'skipped': skipped}
    write_line(args.metrics_file, {'iteration': iteration, **exact, 'seconds': seconds})
    if iteration % args.log_interval or not is_reporter():
        return
    parts = (
        f' [{time.strftime("%Y-%m-%d %H:%M:%S")}] iteration {iteration:8d}/{args.train_iters:8d}',
        f'consumed samples: {iteration * args.global_batch_size:12d}',
        f'elapsed time per iteration (ms): {seconds * 1e3:.1f}',
        f'learning rate: {lr:.6E}',
        f'global batch size: {args.global_batch_size:5d}',
        f'lm loss: {loss:.6E}',
        f'grad norm: {grad_norm:.3f}',
        f'number of skipped iterations: {skipped:3d}',
        f'number of nan iterations: {int(loss != loss):3d}',
    )
    print(' | '.join(parts) + f' | {figures or ""}', flush=True)


def by_layer(
    chunks: Iterable[torch.nn.Module],
) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """(layer, name, parameter): the layer is its number in the whole model, from 1, or a name."""
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, 'pre_process', return_model_obj=True)
        for name, parameter in model.named_parameters():
            place, _, rest = name.partition('.')
            if place in ('decoder', 'encoder') and rest.startswith('layers.'):  # BERT's is one
                index, _, rest = rest.removeprefix('layers.').partition('.')
                place = str(getattr(model, place).layers[int(index)].layer_number)
            yield place, rest, parameter


def fingerprint(
    parameters: Iterable[tuple[str, str, torch.nn.Parameter]], optimizer: Any
) -> dict[str, dict[str, str]]:
    """Return hashes of parameters and optimizer state by layer, whoever holds it: a collective.

    Args:
        parameters: of this rank: layer, name in it, parameter.
        optimizer: Megatron's. What a distributed optimizer has sharded is left out.
    """
    states: dict[torch.Tensor, dict] = {}
    for part in getattr(optimizer, 'chained_optimizers', [optimizer]):
        states.update(part.optimizer.state)
    own: dict[str, list[tuple]] = {'parameters_sha256': [], 'optimizer_sha256': []}
    for layer, name, parameter in parameters:
        place = (layer, name, parallel_state.get_tensor_model_parallel_rank())
        own['parameters_sha256'].append((*place, _sha256([parameter.data])))
        main = getattr(parameter, 'main_param', parameter)
        if main in states:
            state = [states[main][key] for key in sorted(states[main])]
            own['optimizer_sha256'].append((*place, _sha256([main, *state])))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {kind: _by_layer(entry for one in gathered for entry in one[kind]) for kind in own}


def _by_layer(entries: Iterable[tuple]) -> dict[str, str]:
    """One hash a layer; data-parallel copies, which are equal, count once."""
    layers: dict[str, set[tuple]] = {}
    for layer, *rest in entries:
        layers.setdefault(layer, set()).add(tuple(rest))
    return {
        layer: hashlib.sha256(repr(sorted(found)).encode()).hexdigest()
        for layer, found in sorted(layers.items())
    }


def _sha256(values: Iterable[Any]) -> str:
    """Of the bytes of all `values`: tensors, or numbers."""
    digest = hashlib.sha256()
    for value in values:
        tensor = torch.as_tensor(value).detach()
        if type(tensor) is not torch.Tensor:  # weights in FP8
            tensor = tensor.dequantize()
        tensor = tensor.cpu().contiguous().reshape(-1)
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_median(path: Path, measured: list[Any]) -> None:
    """Write the iteration with the median time on the reporting rank, of all but the first."""

    def span(index: int) -> float:
        iteration = measured[index]
        first, last = iteration.record.marks[0][0], iteration.record.marks[-1][1]
        return iteration.clock.seconds(last) - iteration.clock.seconds(first)

    later = sorted(range(1, len(measured)), key=span) or [0]
    chosen = [later[len(later) // 2]]
    dist.broadcast_object_list(chosen, src=dist.get_world_size() - 1)
    measurement = measured[chosen[0]].gather()
    if is_reporter():
        path.write_text(measurement.to_json())
