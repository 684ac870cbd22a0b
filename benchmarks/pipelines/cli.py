"""The command line of scripts/benchmark_pipelines.py."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from benchmarks.common.realtime import realtime
from benchmarks.common.spawning import collected
from benchmarks.pipelines.emulated import Times
from benchmarks.pipelines.entries import (
    AUTO,
    EARLY,
    LIBRARIES,
    TORCH,
    WAITING,
    ZBPP,
    Entry,
    entry,
    is_asynchronous,
    plain,
    selected,
)
from benchmarks.pipelines.measure import Job, checksums_agree, measure
from benchmarks.pipelines.picture import draw, require_matplotlib
from benchmarks.pipelines.table import report, rows, table
from megatron_zbpp.schedules import find

_ABOUT = """\
Measures pipeline schedules side by side without a GPU: Megatron-Core's own, those of
torch.distributed.pipelining, and ours. Every pass sleeps for its given time around a tiny real
matrix product; what is left to measure is the order of the passes and the cost of the runtime.
"""
_MORE = """\
example: four ranks, 16 microbatches, passes of 20 ms; three schedules beside Megatron's 1F1B:

    python scripts/benchmark_pipelines.py --pp 4 --microbatches 16 --times-ms 20,20,20 \\
        --schedules zb-v,auto,torch:ZBVZeroBubble --json result.json --png result.png

optimizer steps that wait for all ranks beside those that do not:

    python scripts/benchmark_pipelines.py --pp 4 --microbatches 16 --optimizer \\
        --iterations-per-sample 4 --schedules zb-v,zb-v+post-validation,zb-2p,zb-2p+post-validation

asynchronous schedules, which do neither, and train another model:

    python scripts/benchmark_pipelines.py --pp 4 --microbatches 4 --optimizer \\
        --iterations-per-sample 8 \\
        --schedules zb-v,zb-v+post-validation,pipedream-2bw,pipedream-2bw+global-norm

columns: median of the samples; what the simulator predicts, with messages that take no time, and
the ratio to it; bubble, the share of the iteration in which a rank idles; ratio to Megatron's 1F1B;
most activations that a rank held, of one microbatch on a full rank; CPU time of a rank's thread
beside the emulated passes, for each pass: Python, autograd and messages of the runtime; for each
pass, how long a rank's thread was ready and all cores were taken: more ranks than cores wait.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, measure, report; the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        job, skipped = _job(args)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    for title, reason in skipped.items():
        print(f'without {title}: {reason}')
    titles = [entry.title for entry in job.entries]
    samples = collected(measure(job), titles, job.rounds)
    found = rows(job, samples)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(report(found, skipped), indent=1) + '\n')
    for picture in filter(None, (args.png, args.svg)):
        draw(found, picture)
    if not all(map(checksums_agree, zip(*samples, strict=True))):  # in each round of its own
        print('checksums differ: the runners did not do the same work', file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('--pp', type=int, default=4, metavar='P', help='ranks, a process each (default: 4)')
    add('--microbatches', type=int, default=16, metavar='M', help='(default: 16)')
    add('--times-ms', default='20,20,20', metavar='F,B,W', help='of a full rank, in ms; a stage '
        'takes its share (default: 20,20,20)')  # fmt: skip
    add('--schedules', metavar='NAME,...', help=f'LIBRARY:NAME, a name of ours, {AUTO}, one of '
        f'these with {EARLY} or {WAITING}, or all of a LIBRARY ({", ".join(LIBRARIES)}); default: '
        'all that fits')  # fmt: skip
    add('--rounds', type=int, default=5, help='samples of each runner (default: 5)')
    add('--iterations-per-sample', type=int, default=1, metavar='N', help='back to back; the time '
        'is that of one, from the end of the second on (default: 1)')  # fmt: skip
    add('--optimizer', action='store_true', help="end each iteration with Megatron's optimizer: "
        'fp32 Adam with clipping, under DistributedDataParallel; without torch')  # fmt: skip
    add('--realtime', action='store_true', help='ranks come before other programs while they are '
        'measured: for a machine with other load; Linux, as root')  # fmt: skip
    add('--json', type=Path, metavar='FILE', help='takes all samples')
    add('--png', type=Path, metavar='FILE', help='takes a bar chart')
    add('--svg', type=Path, metavar='FILE', help='the same')
    return parser


def _job(args: argparse.Namespace) -> tuple[Job, dict[str, str]]:
    """Return what to measure, and what cannot be with the reason.

    Raises:
        ValueError: a value that makes no sense.
        ImportError: a picture is asked for and cannot be drawn.
        FileNotFoundError: a result is to be written where there is no folder.
    """
    for flag, value, least in (
        ('--pp', args.pp, 2),
        ('--microbatches', args.microbatches, 1),
        ('--rounds', args.rounds, 1),
        ('--iterations-per-sample', args.iterations_per_sample, 1),
    ):
        if value < least:
            raise ValueError(f'{flag} {value} is too small: give at least {least}')
    times = _times(args.times_ms)
    texts = args.schedules.split(',') if args.schedules else None
    chosen = selected(texts)
    _check_outputs(args)
    with realtime(args.realtime):
        pass  # may it be had?
    stepping = args.optimizer and args.iterations_per_sample >= 3
    if not texts and not stepping:
        chosen = [each for each in chosen if not is_asynchronous(*each)]
    early = [name for _, name in chosen if name.endswith(EARLY)]
    early += [each[1] for each in chosen if is_asynchronous(*each)]
    if early and not stepping:
        raise ValueError(
            f'{early[0]} is about steps between iterations: give --optimizer and '
            '--iterations-per-sample 3 or more'
        )
    if args.optimizer:
        if any(text.startswith(TORCH) for text in texts or ()):
            raise ValueError("--optimizer is Megatron's: leave torch's schedules out")
        both_ways = [name for library, name in chosen if library == ZBPP and _goes_both_ways(name)]
        if texts and both_ways:
            raise ValueError(
                f'--optimizer has no replicas, of which {both_ways[0]} takes two: leave one out'
            )
        chosen = [(library, name) for library, name in chosen if library != TORCH]
        chosen = [(library, name) for library, name in chosen if name not in both_ways]
    found, skipped = _entries(chosen, args.pp, args.microbatches, times, strict=bool(texts))
    sizes = args.pp, args.microbatches, times, args.rounds, args.iterations_per_sample
    return Job(tuple(found), *sizes, args.optimizer, args.realtime), skipped


def _goes_both_ways(name: str) -> bool:
    return plain(name) != AUTO and find(plain(name)).num_routes > 1


def _times(text: str) -> Times:
    """`--times-ms`, in seconds."""
    try:
        forward, backward, weight = (float(part) / 1e3 for part in text.split(','))
    except ValueError:
        raise ValueError(
            f'--times-ms {text}: give three numbers, of F, B and W, such as 20,24,16'
        ) from None
    times = (forward, backward, weight)
    if not all(math.isfinite(t) and t > 0 for t in times):
        raise ValueError(f'--times-ms {text}: give numbers above 0')
    return Times(*times)


def _check_outputs(args: argparse.Namespace) -> None:
    for flag in ('json', 'png', 'svg'):
        path = getattr(args, flag)
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f'--{flag} {path}: there is no folder {path.parent}')
        if path is not None and flag != 'json':
            require_matplotlib()
            if path.suffix.lower() != f'.{flag}':
                raise ValueError(f'--{flag} {path}: let its name end in .{flag}')


def _entries(
    chosen: list[tuple[str, str]], p: int, m: int, times: Times, strict: bool
) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries, and titles with reasons of those that p and m do not fit.

    Raises:
        ValueError: the same, where they were asked for by name (`strict`).
    """
    found, skipped = [], {}
    for runner, name in chosen:
        try:
            with _planning_bar(shown=name == AUTO) as progress:
                found.append(entry(runner, name, p, m, times, progress))
        except ValueError as error:
            if strict:
                raise
            skipped[f'{runner}:{name}'] = str(error).partition('\n')[0]
    return found, skipped


@contextmanager
def _planning_bar(shown: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar; yield the function that moves it."""
    hidden = None if shown else True  # None: shown on a terminal
    with tqdm(total=100, desc='planning', unit='%', leave=False, disable=hidden) as bar:
        yield lambda share: bar.update(round(100 * share) - bar.n)
