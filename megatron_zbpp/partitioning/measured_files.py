"""Files with times of stages: which kind each is, told by its content, and its times.

Megatron's timers are read from its log: `--timing-log-level 2`, `--timing-log-option all` is best.

>>> log = parse_log('''
...   (min, max) time across ranks (ms):
...     forward-compute ................................: (10.00, 12.00)
...     backward-compute ...............................: (20.00, 23.00)
... ''')
>>> log.intervals
({'forward-compute': {0: 10.0, 1: 12.0}, 'backward-compute': {0: 20.0, 1: 23.0}},)
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_zbpp.ir import BW, F, files, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.costs_file import ROUTES
from megatron_zbpp.ir.placement import layout_string
from megatron_zbpp.partitioning import recordings
from megatron_zbpp.partitioning.recordings import Measured, Recording, divided, from_recordings

FORWARD, BACKWARD, BATCH = 'forward-compute', 'backward-compute', 'batch-generator'
_HEAD = re.compile(r'(\(min, max\) time|max time|times) across ranks \(ms\)')
_NAME = re.compile(r'(?:^|[\s:\]])([a-z][\w/-]*):\s*$')
_RANK = re.compile(r'\brank +(\d+): +(\d+\.\d+)\s*$')
_BOTH = re.compile(r'([a-z][\w/-]*) \.+: \((\d+\.\d+), (\d+\.\d+)\)')
_ARGUMENT = re.compile(r'(?:^|[\s:\]])([a-z]\w+) \.{2,} (\S.*?)\s*$')
_OURS = re.compile(r'megatron_zbpp: version [^:]+: (\S+) on \d+ ranks')
_CURE = (
    'log the times of each rank: --timing-log-level 2 --timing-log-option all, with newer '
    'releases also --logging-level 20'
)
_MILLI = 1e-3
_WARM_UP = 2  # intervals: the first iteration is logged twice by some releases


class Log(NamedTuple):
    """Timers and arguments of a log."""

    # ms of each timer in an iteration, by its name and rank, for each line of the log; of `minmax`,
    # rank 0 has the shortest and 1 the longest
    intervals: tuple[Mapping[str, Mapping[int, float]], ...]
    arguments: Mapping[str, str]  # that Megatron printed at the start
    option: str  # how timers were logged: all, minmax or max
    schedule: str | None  # of ours, that ran; None: Megatron's own


def is_log(text: str) -> bool:
    """Return True for a log with timers, or at least with Megatron's arguments."""
    return _HEAD.search(text) is not None or 'pipeline_model_parallel_size ..' in text


def parse_log(text: str) -> Log:
    """Return timers and arguments of a log, whose lines may have prefixes, as launchers write."""
    arguments: dict[str, str] = {}
    intervals: list[dict[str, dict[int, float]]] = []
    options: set[str] = set()
    schedule = name = None
    for line in text.splitlines():
        if head := _HEAD.search(line):
            intervals.append({})
            name = None
            options.add({'(': 'minmax', 'm': 'max', 't': 'all'}[head[1][0]])
        elif intervals and (own := _RANK.search(line)) and name is not None:
            intervals[-1].setdefault(name, {})[int(own[1])] = float(own[2])
        elif intervals and (both := _BOTH.search(line)):
            intervals[-1][both[1]] = {0: float(both[2]), 1: float(both[3])}
        elif intervals and (own := _NAME.search(line)):
            name = own[1]
        elif own := _ARGUMENT.search(line):
            arguments[own[1]] = own[2]
        elif own := _OURS.search(line):
            schedule = own[1]
    kept = tuple(own for own in intervals if FORWARD in own and BACKWARD in own)
    option = options.pop() if len(options) == 1 else 'all' if 'all' in options else 'minmax'
    return Log(kept, arguments, option, schedule)


def from_log(
    log: Log,
    source: str,
    layout: str | None = None,
    microbatches: int | None = None,
    weight_share: float | None = None,
) -> Measured:
    """Return the times of stages: medians over iterations, but for the first ones."""
    if log.schedule is not None:
        raise ValueError(
            f'{source} is of {log.schedule}, and timers do not see W: take times of it by '
            '--pipeline-trace-dir trace, then zbpp profile trace'
        )
    if not log.intervals or log.option == 'max':
        lacks = 'only the longest time of all ranks' if log.option == 'max' else 'no'
        raise ValueError(f'{source} has {lacks} {FORWARD} and {BACKWARD}: {_CURE}')
    layout = layout or _layout(log.arguments, source)
    m = microbatches or _microbatches(log.arguments, source)
    parts, chunks = layout.split('|'), _integer(log.arguments, _CHUNKS) or 1
    ranks = _integer(log.arguments, _RANKS) or len(parts) // chunks
    if ranks * (len(parts) // ranks) != len(parts):
        raise ValueError(
            f'layout {layout} has {len(parts)} stages, which do not divide among {ranks} ranks: '
            'give --layout as the job has it'
        )
    joined = [''.join(parts[rank::ranks]) for rank in range(ranks)]
    notes: list[str] = []
    if log.option == 'minmax':
        inner = [Counter(own.strip('EL')) for own in joined]
        if any(own != inner[0] for own in inner) or len(joined) < 2:
            raise ValueError(
                f'{source} has the shortest and the longest rank alone, and layers of ranks differ '
                f'({"|".join(joined)}): {_CURE}'
            )
        notes.append(
            'ranks: the shortest and the longest alone were logged; the longest is taken for the '
            'last one, which has the output layer; --timing-log-option all logs each'
        )
    times: dict[tuple[str, int], float] = {}
    for kind, timer in ((F, FORWARD), (BW, BACKWARD)):
        for stage, took in enumerate(_by_stage(log, timer, ranks, source)):
            times[kind, stage] = took * _MILLI / m
    costs, how = divided(times, ranks, weight_share)
    notes += how
    if len(parts) > ranks:
        notes.append('chunks of a rank: not told apart; timers are of a rank')
    if any(BATCH in own for own in log.intervals):
        notes.append(f'F: with the time that reading a batch took ({BATCH})')
    notes.append('messages: not told; timers of messages contain the wait for other ranks')
    return Measured('|'.join(joined), costs, tuple(notes), joined=len(parts) > ranks)


def _by_stage(log: Log, timer: str, ranks: int, source: str) -> Sequence[float]:
    kept = log.intervals[_WARM_UP:] or log.intervals[-1:]
    found = {
        rank: median(own[timer][rank] for own in kept if rank in own[timer])
        for rank in {rank for own in kept for rank in own[timer]}
    }
    if log.option == 'minmax':
        return [found[0]] * (ranks - 1) + [found[1]]
    world = _integer(log.arguments, 'world_size') or max(found) + 1
    inner = _integer(log.arguments, 'tensor_model_parallel_size') or 1
    inner *= _integer(log.arguments, 'context_parallel_size') or 1
    swapped = log.arguments.get('use_tp_pp_dp_mapping') == 'True'
    of: dict[int, list[float]] = {}
    for rank, took in found.items():
        of.setdefault(rank // inner % ranks if swapped else rank * ranks // world, []).append(took)
    if missing := sorted(set(range(ranks)) - of.keys()):
        raise ValueError(
            f'{source}: {timer} lacks pipeline ranks {", ".join(map(str, missing))} of {ranks}: '
            'give --layout as the job has it, and the log of the last rank'
        )
    return [median(of[stage]) for stage in range(ranks)]


_RANKS, _CHUNKS = 'pipeline_model_parallel_size', 'virtual_pipeline_model_parallel_size'
_UNEVEN = ('decoder_first_pipeline_num_layers', 'decoder_last_pipeline_num_layers')


def _integer(arguments: Mapping[str, str], name: str) -> int | None:
    text = arguments.get(name, '')
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else None


def _microbatches(arguments: Mapping[str, str], source: str) -> int:
    names = ('global_batch_size', 'micro_batch_size', 'data_parallel_size')
    sizes = [_integer(arguments, name) for name in names]
    if None in sizes or arguments.get('rampup_batch_size', 'None') != 'None':
        raise ValueError(
            f'{source} does not say how many microbatches an iteration has: give --microbatches'
        )
    whole, micro, data = (size or 1 for size in sizes)
    return max(1, whole // (micro * data))


def _layout(arguments: Mapping[str, str], source: str) -> str:
    ranks, layers = _integer(arguments, _RANKS), _integer(arguments, 'num_layers')
    given = arguments.get('pipeline_model_parallel_layout', 'None')
    stages = (ranks or 1) * (_integer(arguments, _CHUNKS) or 1)
    odd = given != 'None' or any(arguments.get(name, 'None') != 'None' for name in _UNEVEN)
    odd |= arguments.get('hybrid_layer_pattern', 'None') != 'None'
    if ranks is None or layers is None or odd:
        raise ValueError(
            f'{source} does not say which layers a stage has: give --layout, such as '
            "'Ett|ttL': E the embedding, t a layer, L output layer and loss"
        )
    counted = (f'account_for_{name}_in_pipeline_split' for name in ('embedding', 'loss'))
    ends = [arguments.get(name) == 'True' for name in counted]
    if (layers + sum(ends)) % stages:
        raise ValueError(f'{layers} layers do not divide among {stages} stages: give --layout')
    counts = [(layers + sum(ends)) // stages] * stages
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return layout_string(counts, _integer(arguments, 'mtp_num_layers') or 0)


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

    `paths` are a folder of a trace, its file of stages, a log in one or more files, or recordings
    of all ranks. `layout` and `microbatches` go before what the files say; `weight_share` is that
    of W in a backward that was measured as one, a half by default.
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
        log = parse_log('\n'.join(map(str, found)))
        return from_log(log, source, layout, microbatches, weight_share)
    if kinds == {list}:
        if layout is None:
            raise ValueError(f'{source}: {_NO_LAYOUT}')
        every = [each for file in found if isinstance(file, list) for each in file]
        return from_recordings(every, layout, weight_share)
    if len(found) > 1:
        raise ValueError(f'{source}: give one folder or file of stages, the times of one run')
    path, data = paths[0], found[0]
    assert isinstance(data, dict), 'the object of a file of stages'
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


def _read(path: Path) -> str | list[Recording] | dict[str, Any]:
    """Return the text of a log, recordings, or the object of a file of stages."""
    if path.is_dir():
        if not (path / STAGES).exists():
            raise ValueError(
                f'{path} has no {STAGES}: give a folder that --pipeline-trace-dir wrote, in a run '
                "of 5 iterations or more, or, instead of a folder, a profiler's files by name"
            )
        path /= STAGES
    with path.open('rb') as file:
        head = file.read(len(recordings.MAGIC))
    if head == recordings.MAGIC:
        return recordings.read_report(path)
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
    if first == '{' or (first == '[' and not is_log(text)):
        return _of_json(path, text)
    if not is_log(text):
        raise ValueError(f"{path} is a text without Megatron's timers: give {_KNOWN}")
    return text


def _of_json(path: Path, text: str) -> list[Recording] | dict[str, Any]:
    try:
        data: object = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{path} is cut off, or no JSON ({error}): export it again') from error
    if strict_json.is_list(data):
        data = {recordings.EVENTS: data}  # Chrome's format without a head
    if strict_json.is_object(data) and recordings.EVENTS in data:
        recording = recordings.read_trace(data, str(path))
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
