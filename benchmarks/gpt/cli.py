"""The command line of scripts/benchmark_gpt.py."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.gpt import models, predict
from benchmarks.gpt.jobs import (
    SPECS,
    STAGE,
    ZBPP,
    Job,
    microbatches,
    schedules,
    stage_jobs,
    stages,
    training_jobs,
)
from benchmarks.gpt.picture import draw
from benchmarks.gpt.processes import Crew
from benchmarks.gpt.results import MEASURED, Results, table
from benchmarks.pipelines.picture import require_matplotlib
from megatron_zbpp.schedules import find, names

_MODELS = ','.join(name for name in models.MODELS if name != 'tiny')
_SCHEDULES = 'megatron:1f1b,megatron:interleaved,1f1b,zb-h1,zb-v,v-half'
_RANKS = '8,16,32,64,128,256,512'
_ABOUT = """\
Throughput of GPT training by pipeline schedule: the four models of the Zero Bubble paper (1.5b,
6.2b, 14.6b, 28.3b) and GPT-3 (175b), on random words, in bf16 with Megatron's Adam.
"""
_MORE = """\
examples: two models on the eight GPUs of a machine:

    torchrun --nproc-per-node 8 scripts/benchmark_gpt.py --models 1.5b,6.2b \\
        --schedules megatron:1f1b,zb-h1,zb-v --microbatches 3p,8p --json gpt.json --png gpt.png

what one GPU can tell: a stage of each model measured; predictions for pipelines of such stages:

    python scripts/benchmark_gpt.py --single-gpu --json stages.json --png stages.png

A predicted pipeline of p stages is as deep a model as p measured stages make: compare TFLOP/s.

Start the same command again to go on where it ended: what is in --json is not measured again.
A configuration that fails (out of memory) becomes a row with its error; logs are beside --json.
FLOP count as Megatron's; idle, busiest rank: its share of forward-backward without a pass;
idle GPU time: share of all ranks' time that is lost; memory: most that tensors take on a GPU.
--help of scripts/benchmark_pipelines.py: without GPUs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, measure, report; the exit status: 1 if nothing could be measured."""
    arguments = parser()
    args = arguments.parse_args(argv)
    try:
        jobs = _jobs(args)
        results = Results(args.json, args.peak_tflops)
    except (ImportError, OSError, ValueError) as error:
        arguments.error(str(error))
    logs = args.json.with_suffix('.logs')
    logs.mkdir(exist_ok=True)
    crew = Crew(logs, args.timeout)
    _measure(args, crew, jobs, results)
    if crew.rank:
        return 0
    if args.single_gpu:
        _predict(args, jobs, results)
    print(table(results.rows))
    if args.png:
        with suppress(ValueError):  # nothing to draw: the table says why
            draw([row for row in results.rows if 'error' not in row], args.png)
    return 0 if any(row['kind'] == MEASURED for row in results.rows) else 1


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        description=_ABOUT, epilog=_MORE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add('--models', default=_MODELS, metavar='NAME,...', help=f'of {", ".join(models.MODELS)} '
        f'(default: {_MODELS}); tiny is for a CPU')  # fmt: skip
    add('--schedules', metavar='NAME,...', help='megatron:1f1b, megatron:interleaved, or names of '
        f'`zbpp list` (default: {_SCHEDULES}; predictions: all)')  # fmt: skip
    add('--microbatches', default='3p', metavar='M,...', help='numbers, or 3p: three a rank '
        '(default: 3p)')  # fmt: skip
    add('--pipeline-parallel', type=int, metavar='P', help="default: the model's, or all GPUs")
    add('--tensor-parallel', type=int, metavar='T', help="default: the model's: 8 for 175b, else 1")
    add('--virtual-stages', type=int, metavar='V', help='stages a rank, where it can vary')
    add('--micro-batch-size', type=int, metavar='B', help="default: the model's")
    add('--spec', choices=SPECS, default='auto', help="layers: Transformer Engine's, Megatron's "
        'local ones, or the first if they are installed (default)')  # fmt: skip
    add('--warm-up', type=int, default=3, metavar='N', help='iterations first (default: 3)')
    add('--iterations', type=int, default=10, metavar='N', help='measured (default: 10)')
    add('--timeout', type=float, default=1800, metavar='S', help='seconds for a configuration')
    add('--peak-tflops', type=float, metavar='X', help='of one GPU in bf16, for MFU; default: '
        'from its name')  # fmt: skip
    add('--retry-failed', action='store_true', help='measure again what failed before')
    add('--json', type=Path, default=Path('benchmark_gpt.json'), metavar='FILE', help='result, '
        'to which runs add (default: benchmark_gpt.json)')  # fmt: skip
    add('--png', type=Path, metavar='FILE', help='takes a picture')
    add('--single-gpu', action='store_true', help='measure one stage of each model; predict')
    add('--predict-ranks', default=_RANKS, metavar='P,...', help=f'(default: {_RANKS}; the last '
        'takes minutes and gigabytes)')  # fmt: skip
    add('--link-gbytes', type=float, default=25.0, metavar='X', help='GB/s between neighbours, '
        'assumed in predictions (default: 25)')  # fmt: skip
    add('--processes', type=int, default=min(8, os.cpu_count() or 1), metavar='N',
        help='that predict (default: one a core, at most 8)')  # fmt: skip
    return made


def _jobs(args: argparse.Namespace) -> list[Job]:
    """Return what to measure.

    Raises:
        ValueError: a value that makes no sense, or not on this machine.
        ImportError: a picture is asked for and cannot be drawn.
        FileNotFoundError: the result is to be written where there is no folder.
    """
    _check_numbers(args)
    for path in filter(None, (args.json, args.png)):
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f'{path}: there is no folder {path.parent}')
    if args.png:
        require_matplotlib()
        if args.png.suffix.lower() not in ('.png', '.svg'):
            raise ValueError(f'--png {args.png}: let its name end in .png or .svg')
    chosen = args.models.split(',')
    _check_machine(args, [name for name in chosen if models.find(name)])
    if args.spec == 'te' and not _importable('transformer_engine'):
        raise ValueError('--spec te: transformer_engine is not installed')
    others = {name: getattr(args, name) for name in ('spec', 'warm_up', 'iterations')}
    if args.single_gpu:
        _pipelines(args)  # are its values good?
        return list(stage_jobs(chosen, args.micro_batch_size, **others))
    return list(
        training_jobs(
            chosen,
            schedules((args.schedules or _SCHEDULES).split(',')),
            int(os.environ['WORLD_SIZE']),
            counts=args.microbatches.split(','),
            pipeline=args.pipeline_parallel,
            tensor=args.tensor_parallel,
            chunks=args.virtual_stages,
            micro_batch=args.micro_batch_size,
            **others,
        )
    )


def _check_numbers(args: argparse.Namespace) -> None:
    given = vars(args)
    for name, value in given.items():
        least = 0 if name == 'warm_up' else 1
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and (value < least if isinstance(value, int) else value <= 0):
            flag = '--' + name.replace('_', '-')
            raise ValueError(f'{flag} {value:g} is too small: give {least} or more')


def _check_machine(args: argparse.Namespace, chosen: list[str]) -> None:
    """Raise where this machine cannot do it."""
    world = int(os.environ.get('WORLD_SIZE', 0))
    if args.single_gpu and world > 1:
        raise ValueError('--single-gpu takes one process: start it without torchrun')
    if not args.single_gpu and not world:
        raise ValueError(
            'needs torchrun: torchrun --nproc-per-node 8 scripts/benchmark_gpt.py ...; with one '
            'GPU, give --single-gpu'
        )
    gpus, here = torch.cuda.device_count(), int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    if gpus and here > gpus:
        raise ValueError(f'{here} processes, but {gpus} GPUs: give --nproc-per-node {gpus}')
    large = [name for name in chosen if name != 'tiny']
    if not gpus and large:
        raise ValueError(
            f'no GPU here, and {", ".join(large)} would take days on a CPU: give --models tiny'
        )


def _importable(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _measure(args: argparse.Namespace, crew: Crew, jobs: list[Job], results: Results) -> None:
    """Each job that has no row yet, on all ranks together; rank 0 writes."""
    module = f'benchmarks.gpt.{"stage" if args.single_gpu else "train"}'
    with tqdm(jobs, unit='run', disable=None if crew.rank == 0 else True) as bar:
        for job in bar:
            bar.set_description(job.title)
            done = 'yes' if results.has(job, args.retry_failed) else ''
            if crew.share(done):  # rank 0's file is the one that counts
                continue
            refusal = job.refusal()  # the same on all ranks
            row = {'error': refusal} if refusal else crew.run(module, job, bar.set_postfix_str)
            if crew.rank == 0:
                results.add(job, row)
                if 'error' in row:
                    bar.write(f'{job.title}: {row["error"]}', file=sys.stderr)


def _pipelines(args: argparse.Namespace) -> list[predict.Pipeline]:
    """Return what to predict.

    Raises:
        ValueError: a schedule or number is not known.
    """
    texts = args.schedules.split(',') if args.schedules else ()
    chosen = schedules(texts) if texts else [(ZBPP, name) for name in names()]
    found = []
    for text in args.predict_ranks.split(','):
        if not text.isdecimal() or int(text) < 2:
            raise ValueError(f'--predict-ranks {text}: give numbers from 2 up')
        p = int(text)
        for count in args.microbatches.split(','):
            for runner, name in chosen:
                v = stages(find(name), args.virtual_stages)
                sizes = p, microbatches(count, p), v, args.link_gbytes * 1e9
                found.append(predict.Pipeline(runner, name, *sizes))
    return found


def _predict(args: argparse.Namespace, jobs: list[Job], results: Results) -> None:
    """From the stages that `jobs` measured."""
    measured = [
        row
        for row in results.rows
        if row['kind'] == MEASURED and row['schedule'] == STAGE and Job.of_row(row) in jobs
    ]
    pipelines = [each for each in _pipelines(args) if not results.predicts(each, measured)]
    rows = predict.predictions(measured, pipelines, args.processes)
    for made in tqdm(rows, 'predicting', len(pipelines), unit='schedule', disable=None):
        results.predict(made)
