"""Files with times of stages: which kind each is, told by its content, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_zbpp.ir import files, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.costs_file import ROUTES
from megatron_zbpp.partitioning.times import profilers, timers
from megatron_zbpp.partitioning.times.recording import Recording
from megatron_zbpp.partitioning.times.stage_times import Measured, divided, from_recordings

STAGES = 'stages.json'  # of a folder that --pipeline-trace-dir names
_MOST_BYTES = 2**32  # of a trace
_KNOWN = (
    'a folder of --pipeline-trace-dir, traces of torch.profiler (.json, .json.gz), a log with '
    "Megatron's timers, or an sqlite export of Nsight Systems (nsys export --type sqlite)"
)
_NO_LAYOUT = (
    "which layers a stage has is not told: give --layout, such as 'Ett|ttL': E the embedding, t a "
    'layer, L output layer and loss'
)


def read_times(
    paths: Sequence[str],
    layout: str | None = None,
    microbatches: int | None = None,
    weight_share: float | None = None,
    require: Callable[[Costs], None] = lambda costs: None,
) -> Measured:
    """Return the times of stages that files tell.

    Args:
        paths: a folder of a trace, its file of stages, a log in one or more files, or recordings
            of all ranks.
        layout: layers of the stages; None: as the files say.
        microbatches: of an iteration, for a log; None: as it says.
        weight_share: share of a backward that is W, where it was measured as one; default: a half.
        require: raises ValueError for costs of a file of stages that are not of layers.

    Raises:
        ValueError: a file is of no kind that is known, or does not tell enough.
    """
    if layout is not None and not layout.strip('| '):
        raise ValueError(f"--layout {layout!r} has no layers: give such as 'Ett|ttL'")
    found = [_read(Path(path)) for path in paths]
    kinds = {type(own) for own in found}
    if len(kinds) > 1:
        raise ValueError(f'{" and ".join(paths)} are of several kinds: give files of one run')
    source = ', '.join(paths)
    if microbatches is not None and kinds != {str}:
        raise ValueError(f'--microbatches is for logs, and {source} is none: leave it out')
    if kinds == {str}:
        log = timers.parse_log('\n'.join(map(str, found)))
        return timers.from_log(log, source, layout, microbatches, weight_share)
    if kinds == {list}:
        if layout is None:
            raise ValueError(f'{source}: {_NO_LAYOUT}')
        own = [each for file in found if isinstance(file, list) for each in file]
        return from_recordings(own, layout, weight_share)
    if len(found) > 1:
        raise ValueError(f'{source}: give one folder or file of stages, the times of one run')
    return _of_stages(paths[0], found[0], layout, weight_share, require)


def _read(path: Path) -> str | list[Recording] | dict[str, Any]:
    """Return the text of a log, recordings, or the object of a file of stages."""
    if path.is_dir():
        path = _in_folder(path)
    with path.open('rb') as file:
        head = file.read(len(profilers.MAGIC))
    if head == profilers.MAGIC:
        return profilers.read_report(path)
    try:
        text = files.text_of(files.content_of(path, _MOST_BYTES))
    except UnicodeDecodeError as error:
        raise ValueError(
            f'{path} is neither text nor a database: give {_KNOWN}; a report of Nsight Systems '
            '(.nsys-rep) is to be exported first'
        ) from error
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error
    if not text.strip():
        raise ValueError(f'{path} is empty: give {_KNOWN}')
    first = text.lstrip()[0]
    if first == '{' or (first == '[' and not timers.is_log(text)):
        return _of_json(path, text)
    if not timers.is_log(text):
        raise ValueError(f"{path} is a text without Megatron's timers: give {_KNOWN}")
    return text


def _in_folder(folder: Path) -> Path:
    """Return the file of stages in a folder."""
    stages = folder / STAGES
    if stages.exists():
        return stages
    raise ValueError(
        f'{folder} has no {STAGES}: give a folder that --pipeline-trace-dir wrote, in a run of 5 '
        "iterations or more, or, instead of a folder, a profiler's files by name"
    )


def _of_json(path: Path, text: str) -> list[Recording] | dict[str, Any]:
    try:
        data: object = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{path} is cut off, or no JSON ({error}): export it again') from error
    if strict_json.is_list(data):
        data = {profilers.EVENTS: data}  # Chrome's format without a head
    if strict_json.is_object(data) and profilers.EVENTS in data:
        recording = profilers.read_trace(data, str(path))
        if not recording.ranges and not recording.operations:
            raise ValueError(
                f'{path} has no passes of a training: give a trace that torch.profiler recorded on '
                'a rank, of whole iterations with CPU activities (pictures of '
                f'--pipeline-trace-dir: give the folder, which has {STAGES})'
            )
        return [recording]
    if strict_json.is_object(data) and ('F' in data or 'times' in data):
        try:
            read: Any = strict_json.loads(text)
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from error
        return read
    what = strict_json.other_kind(data, 'it is JSON of another kind')
    raise ValueError(f'{path}: {what}: give {_KNOWN}')


def _of_stages(
    path: str,
    data: Any,
    layout: str | None,
    weight_share: float | None,
    require: Callable[[Costs], None],
) -> Measured:
    """Return the times in a file of stages."""
    own = data.get('layout')
    known = layout or own
    if not isinstance(known, str):
        raise ValueError(f'{path}: {_NO_LAYOUT} (a trace of this release says so itself)')
    if own not in (None, known):
        raise ValueError(f'--layout {layout}, but {path} has {own!r}: leave it out')
    try:
        costs = Costs.from_json(json.dumps(data))
        require(costs)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error
    routes = tuple(tuple(route) for route in data.get(ROUTES, ()))
    if any(costs.times['W']):
        if weight_share is not None:
            raise ValueError('--weight-share, but W was measured apart from B: leave it out')
        return Measured(known, costs, routes=routes)
    times = {
        (kind, stage): time for kind in ('F', 'B') for stage, time in enumerate(costs.times[kind])
    }
    apart, notes = divided(times, costs.num_stages, weight_share)
    return Measured(known, costs.with_times(**apart.times), tuple(notes), routes=routes)
