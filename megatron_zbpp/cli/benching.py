"""`zbpp bench`: a launch line by its own schedule and by ours, in turns, from one checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from megatron_zbpp.cli.printing import gib, print_json, print_table, print_wrapped, progress, say
from megatron_zbpp.ir import files
from megatron_zbpp.ir.strict_json import is_object
from megatron_zbpp.render.png import bars_png
from megatron_zbpp.schedules import find

if TYPE_CHECKING:
    from megatron_zbpp.launch.launch_line import Bench

_RUNS, _START = 'runs.json', 'start'
_ENOUGH = 3  # runs of which the spread tells the noise


BENCH = """
    --schedules NAME,...  names = zb-h1,zb-v,auto  beside the one of the line; auto: one that is
        planned from the times of the first iterations. Default zb-h1,zb-v,auto
    --iterations N  count = 20  of a run; default 20
    --warmup N  whole  iterations of a run that no time is taken of; default: half of them
    --rounds N  count = 3  runs of each schedule, in turns; default 3
    --cpu  switch  run on CPU and gloo
    -o --output FOLDER  path = zbpp-bench  of logs and results; a bench that was stopped goes on
        there. Default zbpp-bench
    line -- LAUNCH LINE  text*  torchrun and all; for several nodes what starts it on each
        before it, as scripts/slurm/bench.sbatch does
"""  # what `zbpp bench` takes


def bench(
    line: list[str],
    schedules: list[str],
    iterations: int,
    warmup: int | None,
    rounds: int,
    cpu: bool,
    output: str,
    as_json: bool,
) -> int:
    """Return 0, 1 where a run failed, or 130 where Ctrl-C ended the bench; prints what ran."""
    from megatron_zbpp.launch.launch_line import OWN, Bench  # takes torch and Megatron

    names = [name if name == 'auto' else find(name).name for name in schedules]
    schedules = list(dict.fromkeys([OWN, *names]))
    job, folder = Bench.of(line, cpu), Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    warmup = iterations // 2 if warmup is None else warmup
    runs = _Runs(folder, [*line, *(['--cpu'] if cpu else [])], iterations)
    status = 0
    turns = itertools.product(range(rounds), schedules)
    missing = [(name, turn) for turn, name in turns if turn >= len(runs.of(name))]
    try:
        start = job.load or (_written_start(job, folder) if missing else '')
        with progress('runs', 'run', len(missing)) as done:
            for k, (name, turn) in enumerate(missing, 1):
                say(f'{name}, run {turn + 1} of {rounds}')
                log = folder / f'{name.replace(" ", "-")}-{turn + 1}.log'
                runs.add(name, turn, _run(job.run(name, iterations, start), log))
                done(k / len(missing))
        shutil.rmtree(folder / _START, ignore_errors=True)
    except KeyboardInterrupt:
        say(f'interrupted: this ran by then; the same command with -o {folder} goes on')
        status = 128 + signal.SIGINT
    rows = [_row(name, runs.of(name), job, warmup) for name in schedules if runs.of(name)]
    if not rows:
        return status
    _judge(rows, job)
    picture = _draw(rows, folder, job)
    if as_json:
        told = {'schedules': rows, 'iterations': iterations, 'warmup': warmup}
        print_json({**told, 'picture': picture})
    else:
        _print(rows, job)
        print(f'wrote {picture}' if picture else 'no picture: pip install matplotlib')
    return status or int(any(row['error'] for row in rows))


class _Runs:
    """Results of runs, in a file: so that a bench that was stopped goes on."""

    def __init__(self, folder: Path, line: Sequence[str], iterations: int) -> None:
        self._file = folder / _RUNS
        self._content: dict[str, Any] = {'line': list(line), 'iterations': iterations}
        known: Any = {}
        if self._file.exists():
            known = files.read(self._file, json.loads, 'another -o')
            for key, value in self._content.items():
                if not is_object(known) or known.get(key) != value:
                    raise ValueError(
                        f'-o {folder} has runs of other {key}: name another folder, or delete it'
                    )
        self._found: dict[str, list[Any]] = known.get('runs', {})
        self._content['runs'] = self._found

    def of(self, name: str) -> list[Any]:
        return self._found.get(name, [])

    def add(self, name: str, turn: int, found: Any) -> None:
        assert turn == len(self.of(name)), 'runs of a schedule end in order'
        self._found.setdefault(name, []).append(found)
        self._file.write_text(json.dumps(self._content, indent=1), encoding='utf-8')


def _written_start(job: Bench, folder: Path) -> str:
    """Return the folder of the checkpoint that all runs begin with; writes it if need be."""
    start = folder / _START
    if not (start / 'latest_checkpointed_iteration.txt').exists():
        say("a checkpoint, by Megatron's own schedule")
        log = folder / 'start.log'
        found = _run(job.start(str(start)), log)
        if found['error']:
            raise ValueError(f'the launch line fails: {found["error"]}: see {log}')
    return str(start)


def _run(words: Sequence[str], log: Path) -> dict[str, Any]:
    from megatron_zbpp.launch.launch_line import Printed

    printed = Printed()
    with log.open('w', encoding='utf-8') as file:
        file.write(f'$ {shlex.join(words)}\n')
        pipes: dict[str, Any] = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
        start = partial(subprocess.Popen[str], text=True, errors='replace', start_new_session=True)
        with contextlib.ExitStack() as running:
            with _interrupted_later():  # else a run could begin that nobody ends
                process = running.enter_context(start(words, **pipes))
                running.callback(_end, process)
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                printed.read(line)
            code = process.wait()
    failed = bool(code) or not printed.steps
    return {
        'seconds': [step.seconds for step in printed.steps],
        'losses': [step.loss for step in printed.steps],
        'idle': [step.idle for step in printed.steps],
        'peak_bytes': printed.peak_bytes,
        'error': printed.said if failed else None,
    }


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _end(process: subprocess.Popen[str]) -> None:
    """End a run and the processes that it started; torchrun needs some time for that."""
    if process.poll() is not None:
        return
    for number, grace in ((signal.SIGTERM, 60), (signal.SIGKILL, None)):
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
            return


def _row(name: str, runs: Sequence[Any], job: Bench, warmup: int) -> dict[str, Any]:
    good = [run for run in runs if not run['error']]
    error = next((run['error'] for run in runs if run['error']), None)
    times = [median(run['seconds'][warmup:] or run['seconds']) for run in good]
    seconds = median(times) if times else None
    idle = [share for run in good for share in run['idle'][warmup:] if share is not None]
    peaks = [run['peak_bytes'] for run in good if run['peak_bytes'] is not None]
    return {
        'name': name,
        'runs': times,
        'seconds': seconds,
        'spread': (max(times) - min(times)) / seconds if seconds and times[1:] else None,
        'tokens_a_second': job.tokens / seconds if seconds and job.tokens else None,
        'idle_all_ranks': fmean(idle) if idle else None,
        'peak_bytes': max(peaks, default=None),
        'losses': good[0]['losses'] if good else [],
        'error': error,
    }


def _judge(rows: list[dict[str, Any]], job: Bench) -> None:
    """Add to each row its gain over the first, the noise of that, and whether losses are equal."""
    from megatron_zbpp.mcore.training_log import DRAWING

    first = rows[0]
    drawing = any(getattr(job.line.args, name, None) for name in DRAWING)
    for row in rows:
        both = row['seconds'] and first['seconds']
        row['gain'] = 1 - row['seconds'] / first['seconds'] if both else None
        known = both and min(len(row['runs']), len(first['runs'])) >= _ENOUGH
        row['noise'] = max(row['spread'], first['spread']) if known else None
        equal = row['losses'] == first['losses'] if both else None
        row['losses_equal'] = equal
        row['why'] = 'other random numbers, as of dropout' if equal is False and drawing else None


def _gain(row: dict[str, Any]) -> str:
    """Return a gain as text, with a question mark where noise is unknown or as large."""
    if row['gain'] is None:
        return '-'
    sure = row['noise'] is not None and abs(row['gain']) > row['noise']
    return f'{row["gain"]:.1%}' + '?' * (not sure)


def _draw(rows: Sequence[dict[str, Any]], folder: Path, job: Bench) -> str | None:
    """Draw the runs, and return the picture's path; None: no matplotlib, or no runs."""
    runs = {row['name']: [1e3 * each for each in row['runs']] for row in rows if row['runs']}
    if not runs or find_spec('matplotlib') is None:
        return None
    path, where = folder / 'bench.png', ', CPU' if job.line.on_cpu else ''
    gains = [f'gain {_gain(row)}' for row in rows if row['runs']]
    title = f'{Path(job.script).name} on {job.line.world_size} ranks{where}'
    bars_png(runs, ['', *gains[1:]], path, title)
    return str(path)


def _print(rows: list[dict[str, Any]], job: Bench) -> None:
    def cell(value: float | None, text: str) -> str:
        return '-' if value is None else text.format(value)

    said = {None: '-', True: 'equal', False: 'differ'}
    cells = [
        {
            'schedule': row['name'],
            'ms/step': cell(row['seconds'] and row['seconds'] * 1e3, '{:.1f}'),
            'spread': 'unknown' if row['spread'] is None else f'{row["spread"]:.1%}',
            'gain': _gain(row) if row is not rows[0] else '-',
            'tokens/s': cell(row['tokens_a_second'], '{:.0f}'),
            'idle': cell(row['idle_all_ranks'], '{:.1%}'),
            'peak': '-' if row['peak_bytes'] is None else gib(row['peak_bytes']),
            'losses': said[row['losses_equal']],
        }
        for row in rows
    ]
    print_table([*cells[0]], [[*own.values()] for own in cells])
    if job.line.on_cpu:
        print_wrapped('CPU figures: not what a GPU gains')
    own = ' '.join(job.own) or "Megatron's own schedule"
    print_wrapped(
        f'{rows[0]["name"]}: {own}. Gain: time saved against it; spread: longest less shortest of '
        'the runs, over their median: unknown of one run; ?: the gain may be noise, which is the '
        f'larger spread of both, and unknown below {_ENOUGH} runs; idle: share of all GPU time; '
        'peak: most that tensors take on a GPU; losses: as printed, each step'
    )
    for why in dict.fromkeys(filter(None, (row['why'] for row in rows))):
        print_wrapped(f'losses differ: {why}')
    for row in rows:
        if row['error']:
            print_wrapped(f'{row["name"]} failed: {row["error"]}')
    judged = [row for row in rows[1:] if row['noise'] is not None]
    best = max(judged, key=lambda row: row['gain'], default=None)
    if best is None:
        print(f'no gain is known to be more than noise: take --rounds {_ENOUGH} or more')
    elif best['gain'] > best['noise']:
        print_wrapped(f'for your script: -m megatron_zbpp.launch before {job.script}, and behind')
        print(f'    --pipeline-schedule {best["name"]}')
    else:
        print('no schedule is faster than that of the line by more than the noise')
