"""Megatron's timers in its log: `--timing-log-level 2`, best with `--timing-log-option all`.

>>> log = parse_log('''
...   (min, max) time across ranks (ms):
...     forward-compute ................................: (10.00, 12.00)
...     backward-compute ...............................: (20.00, 23.00)
... ''')
>>> log.intervals
({'forward-compute': {0: 10.0, 1: 12.0}, 'backward-compute': {0: 20.0, 1: 23.0}},)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megatron_zbpp.ir import BW, F
from megatron_zbpp.ir.layout import layout_string
from megatron_zbpp.partitioning.times.stage_times import Measured, divided

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
    """Return whether a text is a log with timers, or at least with Megatron's arguments."""
    return _HEAD.search(text) is not None or 'pipeline_model_parallel_size ..' in text


def parse_log(text: str) -> Log:
    """Return what a log tells; lines may have prefixes, as launchers write."""
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
        notes.append(_guess(joined, source))
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
    """Return ms of an iteration for each pipeline rank, in their order."""
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


def _guess(joined: Sequence[str], source: str) -> str:
    inner = [Counter(own.strip('EL')) for own in joined]
    if any(own != inner[0] for own in inner) or len(joined) < 2:
        raise ValueError(
            f'{source} has the shortest and the longest rank alone, and layers of ranks differ '
            f'({"|".join(joined)}): {_CURE}'
        )
    return (
        'ranks: the shortest and the longest alone were logged; the longest is taken for the last '
        'one, which has the output layer; --timing-log-option all logs each'
    )


_RANKS, _CHUNKS = 'pipeline_model_parallel_size', 'virtual_pipeline_model_parallel_size'
_UNEVEN = ('decoder_first_pipeline_num_layers', 'decoder_last_pipeline_num_layers')


def _integer(arguments: Mapping[str, str], name: str) -> int | None:
    text = arguments.get(name, '')
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else None


def _microbatches(arguments: Mapping[str, str], source: str) -> int:
    sizes = [
        _integer(arguments, name)
        for name in ('global_batch_size', 'micro_batch_size', 'data_parallel_size')
    ]
    if None in sizes or arguments.get('rampup_batch_size', 'None') != 'None':
        raise ValueError(
            f'{source} does not say how many microbatches an iteration has: give --microbatches'
        )
    whole, micro, data = (size or 1 for size in sizes)
    return max(1, whole // (micro * data))


def _layout(arguments: Mapping[str, str], source: str) -> str:
    """Return the layers of the stages, as Megatron divides them."""
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
    ends = [
        arguments.get(f'account_for_{name}_in_pipeline_split') == 'True'
        for name in ('embedding', 'loss')
    ]
    if (layers + sum(ends)) % stages:
        raise ValueError(f'{layers} layers do not divide among {stages} stages: give --layout')
    counts = [(layers + sum(ends)) // stages] * stages
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return layout_string(counts, _integer(arguments, 'mtp_num_layers') or 0)
