"""Trains a small GPT by 1F1B and by asynchronous methods, and draws their losses: see --help."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.render.png import new_figure
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.composition import TRAINED_BY
from megatron_zbpp.techniques.updates.versions import steady_state

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / 'examples' / 'gpt'
STOCK, SAME = '1f1b', 'zb-v'  # which trains what 1F1B trains, to the bit
METHODS = 'pipedream-2bw', 'pipedream', 'paci', 'pipemare', 'wpipe'
SMOOTHED = 20  # steps of which a mean is drawn and shown


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small GPT on real text by Megatron's own 1F1B, and from the same "
        'weights by asynchronous methods, all alike but for the schedule. Draws losses by step, '
        'and by the clock that the simulator has for each (F = B = W = 1): ranks that share cores '
        'have none of their own. zb-v is 1F1B, to the bit, on another clock.'
    )
    add = parser.add_argument
    add('--ranks', type=int, default=4, help='pipeline ranks (default: 4)')
    add('--microbatches', type=int, help='of a step (default: one a rank)')
    add('--iterations', type=int, default=200, help='steps of each method (default: 200)')
    add('--methods', default=','.join(METHODS), help=f'separated by commas ({",".join(METHODS)})')
    add('--hidden-size', type=int, default=64, help='of the model (default: 64)')
    add('--seq-length', type=int, default=64, help='tokens (default: 64)')
    add('--lr', type=float, default=1e-3, help='largest learning rate of Adam (default: 1e-3)')
    add('--output', type=Path, default=Path('runs/asynchronous'), help='folder of what is written')
    add('--png', type=Path, help='the picture (default: losses.png in --output)')
    args = parser.parse_args(argv)
    args.methods = args.methods.split(',')
    if unknown := [each for each in args.methods if each not in METHODS]:
        parser.error(f'--methods {unknown[0]} is not asynchronous: give some of {METHODS}')
    for name, least in (('ranks', 2), ('iterations', 1), ('hidden_size', 8), ('seq_length', 2)):
        if getattr(args, name) < least:
            flag = '--' + name.replace('_', '-')
            parser.error(f'{flag} {getattr(args, name)} is too small: give at least {least}')
    args.microbatches = args.microbatches or args.ranks
    if args.microbatches < args.ranks - 1:
        parser.error(f'--microbatches {args.microbatches} is too small: give {args.ranks - 1}')
    return args


def train(args: argparse.Namespace, schedule: str) -> list[float]:
    """Run the example under torchrun; return the loss of each step."""
    metrics = args.output / f'{schedule}.metrics.jsonl'
    metrics.unlink(missing_ok=True)
    options = {
        'pipeline-model-parallel-size': args.ranks,
        'pipeline-schedule': 'megatron' if schedule == STOCK else schedule,
        'num-layers': 2 * args.ranks,
        'hidden-size': args.hidden_size,
        'num-attention-heads': 4,
        'seq-length': args.seq_length,
        'micro-batch-size': 2,
        'global-batch-size': 2 * args.microbatches,
        'train-iters': args.iterations,
        'lr': args.lr,
        'data-path': args.output / 'text',
        'log-interval': 10**6,
        'metrics-file': metrics,
    }
    flags = [f'--{name}={value}' for name, value in options.items()]
    flags += ['--untie-embeddings-and-output-weights']
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    launch += [f'--nproc-per-node={args.ranks}', str(EXAMPLE / 'pretrain_gpt.py'), *flags]
    log = args.output / f'{schedule}.log'
    with log.open('w') as output:
        if subprocess.run(launch, stdout=output, stderr=output, env=environment()).returncode:
            sys.exit(f'training by {schedule} failed: {log} tells why')
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [float.fromhex(line['loss']) for line in lines if 'loss' in line]


def environment() -> dict[str, str]:
    """One thread a rank, no GPU, and the package where it lies."""
    return os.environ | {
        'OMP_NUM_THREADS': '1',
        'PYTHONWARNINGS': 'ignore',
        'CUDA_VISIBLE_DEVICES': '',
        'PYTHONPATH': str(ROOT),
    }


def period(name: str, ranks: int, microbatches: int) -> float:
    """Return the simulated time of a step, where F, B and W of a rank's layers take 1 each."""
    schedule = build(TRAINED_BY.get(name, name), ranks, microbatches)
    timeline = simulate(schedule, Costs.uniform(schedule.placement))
    steady = steady_state(timeline)
    return timeline.makespan if steady is None else steady.period


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of each step and of those before it, up to SMOOTHED."""
    ends = range(1, len(losses) + 1)
    return [
        sum(last) / len(last) for end in ends for last in [losses[max(0, end - SMOOTHED) : end]]
    ]


def rows(curves: dict[str, list[float]], periods: dict[str, float]) -> list[list[str]]:
    """Return the table: of each method its losses at the last step and at the same time."""
    steps = len(next(iter(curves.values())))
    time = min(periods.values()) * steps
    found = [['schedule', 'time of a step', 'loss at the last step', 'steps', 'loss then']]
    for name, losses in curves.items():
        taken = int(time / periods[name])
        cells = f'{periods[name]:g}', f'{losses[-1]:.3f}', f'{taken}', f'{losses[taken - 1]:.3f}'
        found.append([f'`{name}`', *cells])
    return found


def draw(curves: dict[str, list[float]], periods: dict[str, float], path: Path) -> None:
    """Draw losses by step, and by simulated time up to where the fastest has ended."""
    figure = new_figure(10.0, 4.5)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    end = min(periods.values()) * len(next(iter(curves.values())))
    for number, (name, losses) in enumerate(curves.items()):
        hue, steps = f'C{number}', range(1, len(losses) + 1)
        if name != SAME:
            label = f'{name} (= {SAME})' if name == STOCK else name
            by_step.plot(steps, losses, label=label, color=hue)
        times = [step * periods[name] for step in steps if step * periods[name] <= end]
        by_time.plot(times, losses[: len(times)], label=name, color=hue)
    by_step.set(xlabel='step', ylabel=f'loss, mean of {SMOOTHED} steps')
    by_time.set(xlabel='simulated time, F of a microbatch on a rank = 1')
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110, format='png')


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    prepare = [sys.executable, EXAMPLE / 'prepare_data.py', '--output', args.output / 'text']
    subprocess.run(prepare, check=True, env=environment(), stdout=subprocess.DEVNULL)
    curves = {STOCK: smoothed(train(args, STOCK))}
    curves[SAME] = curves[STOCK]
    curves |= {method: smoothed(train(args, method)) for method in args.methods}
    periods = {name: period(name, args.ranks, args.microbatches) for name in curves}
    for number, cells in enumerate(rows(curves, periods)):
        print(f'| {" | ".join(cells)} |')
        if not number:
            print('|---' * len(cells) + '|')
    path = args.png or args.output / 'losses.png'
    draw(curves, periods, path)
    print(f'wrote {path}')


if __name__ == '__main__':
    main()
