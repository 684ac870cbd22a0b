"""Trains a small GPT by three schedules on the CPU and compares them; quickstart.sh calls it."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from megatron_zbpp.analysis.fit_costs import fit
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.render.png import loss_png, timeline_png
from megatron_zbpp.runtime.measure import Measurement

EXAMPLE = Path(__file__).parents[1] / 'examples' / 'gpt'
EVERY = 10  # iterations a line of progress, where there is no terminal
SCHEDULES = {'megatron': "Megatron's 1F1B", 'zb-h1': 'zb-h1', 'zb-v': 'zb-v'}


@dataclass(frozen=True)
class Result:
    """One training run: exact losses, seconds of each iteration, the median iteration."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    measurement: Measurement


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='quickstart.sh',
        description="Trains a small GPT on real text by Megatron-Core's untouched 1F1B, then from "
        'the same weights by zb-h1 and zb-v, on CPU and gloo; prints a table and draws pictures.',
    )
    add = parser.add_argument
    ranks = min(max(2, os.cpu_count() or 2), 4)
    add('--ranks', type=int, default=ranks, help='default: one a core, at most 4')
    add('--input', type=Path, nargs='+', help="text to train on; default: Python's own sources")
    add('--iterations', type=int, default=40, help='of each schedule')
    add('--hidden-size', type=int, default=192)
    add('--seq-length', type=int, default=128)
    add('--microbatches', type=int, help='default: four a rank')
    add('--output', type=Path, default=Path('runs/quickstart'), help='folder for what it writes')
    args = parser.parse_args(argv)
    for name, least in (('ranks', 2), ('iterations', 1), ('hidden_size', 8), ('seq_length', 2)):
        if getattr(args, name) < least:
            flag = '--' + name.replace('_', '-')
            parser.error(f'{flag} {getattr(args, name)} is too small: give at least {least}')
    return args


def prepare(args: argparse.Namespace) -> Path:
    """Return the data set: made once for each choice of input."""
    inputs = [str(path.resolve()) for path in args.input or ()]
    data = args.output / 'data' / (re.sub(r'\W+', '_', ' '.join(inputs))[-80:] or 'python')
    command = [sys.executable, EXAMPLE / 'prepare_data.py', '--output', data]
    command += ['--input', *inputs] if inputs else []
    subprocess.run([*command], check=True, env=environment())
    return data


def environment() -> dict[str, str]:
    """One thread a rank, no GPU, and no warnings about what only a GPU has."""
    quiet = {'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore', 'TORCH_CPP_LOG_LEVEL': 'ERROR'}
    return os.environ | quiet | {'CUDA_VISIBLE_DEVICES': ''}


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int, float], None]]:
    """Yield what is told of each iteration: on a terminal a bar, in a log a line now and then."""
    if not sys.stderr.isatty():

        def tell(iteration: int, loss: float) -> None:
            if iteration % EVERY == 0 or iteration == total:
                print(f'{what}: {iteration}/{total}, loss {loss:.4f}', file=sys.stderr, flush=True)

        yield tell
        return
    with tqdm(total=total, desc=what, unit='it') as bar:

        def move(iteration: int, loss: float) -> None:
            bar.set_postfix_str(f'loss {loss:.4f}')
            bar.update(iteration - bar.n)

        yield move


def train(args: argparse.Namespace, data: Path, schedule: str) -> Result:
    """Run the example under torchrun, showing its progress."""
    metrics = args.output / f'{schedule}.metrics.jsonl'
    timeline = args.output / f'{schedule}.timeline.json'
    metrics.unlink(missing_ok=True)
    microbatches = args.microbatches or 4 * args.ranks
    options = {
        'pipeline-model-parallel-size': args.ranks,
        'pipeline-schedule': schedule,
        'num-layers': 4 * args.ranks,
        'hidden-size': args.hidden_size,
        'num-attention-heads': 4,
        'seq-length': args.seq_length,
        'micro-batch-size': 2,
        'global-batch-size': 2 * microbatches,
        'train-iters': args.iterations,
        'clip-grad': 0,
        'data-path': data,
        'metrics-file': metrics,
        'timeline-file': timeline,
    }
    flags = [f'--{name}={value}' for name, value in options.items()]
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    launch += [f'--nproc-per-node={args.ranks}', str(EXAMPLE / 'pretrain_gpt.py'), *flags]
    log = args.output / f'{schedule}.log'
    with log.open('w+') as output:
        process = subprocess.Popen(
            launch, stdout=subprocess.PIPE, stderr=output, text=True, env=environment()
        )
        with progress(f'{SCHEDULES[schedule]:16}', args.iterations) as done:
            for line in process.stdout:
                output.write(line)
                if found := re.search(r'iteration +(\d+)/.*lm loss: (\S+)', line):
                    done(int(found[1]), float(found[2]))
        if process.wait():
            sys.exit(f'training by {schedule} failed: {log} tells why')
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if 'loss' in line]
    return Result(
        tuple(float.fromhex(step['loss']) for step in steps),
        tuple(step['seconds'] for step in steps),
        Measurement.from_json(timeline.read_text()),
    )


def table(results: dict[str, Result]) -> str:
    """Return the comparison, a row a schedule."""
    reference = results['megatron'].losses
    rows = [
        (
            'schedule',
            'final loss',
            'identical',
            's/iteration',
            'bubble',
            'idle GPU time',
            'simulated idle',
            'live per rank',
        )
    ]
    for schedule, result in results.items():
        timeline = result.measurement.timeline
        simulated = simulate(timeline.schedule, fit(timeline))
        same = 'bit for bit' if result.losses == reference else 'NO'
        rows.append(
            (
                SCHEDULES[schedule],
                f'{result.losses[-1]:.6f}',
                'reference' if schedule == 'megatron' else same,
                f'{statistics.median(result.seconds[1:] or result.seconds):.3f}',
                f'{timeline.bubble:.1%}',
                f'{timeline.idle_all_ranks:.1%}',
                f'{simulated.idle_all_ranks:.1%}',
                ' '.join(f'{peak:g}' for peak in result.measurement.peak_activations),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join(
        '  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def pictures(args: argparse.Namespace, results: dict[str, Result]) -> list[Path]:
    """Draw loss curves and measured timelines; the files' paths."""
    curves, lines = args.output / 'loss.png', args.output / 'timelines.png'
    loss_png({SCHEDULES[name]: result.losses for name, result in results.items()}, curves)
    measured = {SCHEDULES[name]: result.measurement.timeline for name, result in results.items()}
    timeline_png(
        {f'{name}, measured': timeline for name, timeline in measured.items()},
        lines,
        unit='s',
        heading=f'the median iteration of {args.iterations}, {args.ranks} ranks, CPU and gloo',
    )
    return [curves, lines]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    data = prepare(args)
    results = {schedule: train(args, data, schedule) for schedule in SCHEDULES}
    print(f'\n{args.ranks} ranks, CPU and gloo; CPU figures, not GPU ones\n')
    print(table(results))
    print(f'\n{MEANING} (of the median iteration)')
    print(
        'simulated idle: by the median times of the passes; live: most activations held, in '
        'microbatches\nThe runs come one after the other and the model is small: differences in '
        's/iteration are noise.\nThat losses agree is the point here, not what a GPU gains.\n'
    )
    for path in pictures(args, results):
        print(f'wrote {path}')
    if any(result.losses != results['megatron'].losses for result in results.values()):
        sys.exit("losses differ from Megatron's: this is a bug, please report it")


if __name__ == '__main__':
    main()
