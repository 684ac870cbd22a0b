"""`zbpp advise`: the ten fastest setups of a job that fit, with a launch line of each."""

from __future__ import annotations

import shlex
import textwrap
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_zbpp.analysis.gain import gain_of
from megatron_zbpp.cli import values
from megatron_zbpp.cli.arguments import load_layers
from megatron_zbpp.cli.printing import gib, print_json, print_table, print_wrapped, progress
from megatron_zbpp.cli.profiling import SIZES, add_sizes, option, shape_of
from megatron_zbpp.partitioning.advise.job import JOB_SIZES, STOCK, Job, Setup
from megatron_zbpp.partitioning.advise.prediction import BY_RATES, BY_TIMES, Prediction
from megatron_zbpp.partitioning.advise.search import (
    HELD,
    SCHEDULES,
    Advice,
    advise,
    flags_of,
    with_layers,
)
from megatron_zbpp.planner.limits import Bytes
from megatron_zbpp.schedules import find

_SEARCHED = ('tp', 'ep', 'dp', 'micro_batch')  # of a shape, what a setup says
_HELD = {
    'pp': 'pipeline-parallel ranks',
    'tp': 'tensor-parallel ranks',
    'chunks': 'model chunks of a pipeline rank',
    'ep': 'expert-parallel ranks',
    'micro_batch': 'samples of a microbatch',
}
_NOT_IN_A_LINE = {
    'tflops': 'TFLOP/s that a matrix product reaches: for the predicted time of an iteration',
    'bandwidth': "GB/s of a GPU's memory; default: what is no product takes no time",
    'vocab': 'entries of the vocabulary, where the line does not say: for memory in GiB',
}
_MOST_GPUS = 16_384
_LETTERS = {'none': '-', 'selective': 'sel', 'full': 'full'}
_RATES = {
    'within': 'GB/s that a GPU sends to others of its node, in one direction',
    'between': 'GB/s that a GPU sends to other nodes',
    'host': 'GB/s of copies between a GPU and its host',
}
_MACHINE = ('gpus', 'memory', 'gpus_per_node', 'reserve', *_RATES)  # fields of `Job`


def add_advise(command: ArgumentParser) -> None:
    """Add what `zbpp advise` takes."""
    command.add_argument('--gpus', type=_gpus, metavar='N', required=True, help='of the job')
    command.add_argument(
        '--memory', type=_nbytes, metavar='BYTES', required=True, help='of a GPU, such as 80GiB'
    )
    command.add_argument(
        '--reserve',
        type=_nbytes,
        metavar='BYTES',
        default=JOB_SIZES['reserve'],
        help='of it that the model cannot have: CUDA context, NCCL, fragments; default 4GiB',
    )
    for name, text in _HELD.items():
        command.add_argument(
            HELD[name],
            dest=f'held_{name}',
            type=values.count,
            metavar='N',
            help=f'{text}, of all setups; default: the fastest',
        )
    command.add_argument(
        '--cp', type=values.count, metavar='N', help='with --model: context-parallel ranks'
    )
    _add_machine(command)
    command.add_argument(
        '--schedules',
        type=values.names,
        metavar='NAME,...',
        default=SCHEDULES,
        help=f'that may run; default {",".join(SCHEDULES)}',
    )
    command.add_argument(
        '--count', type=values.count, metavar='N', default=10, help='of setups; default 10'
    )
    command.add_argument(
        '--layers-file',
        type=values.path,
        metavar='FILE',
        help='measured layers of the launch line as it is (zbpp profile --stages ... -o FILE), '
        'instead of --tflops and --bandwidth',
    )
    command.add_argument(
        '--global-batch-size', type=values.count, metavar='N', help='with --model: samples a step'
    )
    add_sizes(command, _SEARCHED)
    command.add_argument('line', nargs='*', metavar='-- LAUNCH LINE', help='torchrun and all')


def _add_machine(command: ArgumentParser) -> None:
    """Add the GPUs of a node, and the rates of links."""
    command.add_argument(
        '--gpus-per-node',
        type=values.count,
        metavar='N',
        default=JOB_SIZES['gpus_per_node'],
        help='GPUs of a node; default 8',
    )
    for name, text in _RATES.items():
        default = JOB_SIZES[name]
        command.add_argument(
            f'--{name}',
            type=values.positive,
            metavar='GB/S',
            default=default,
            help=f'{text}; default {default:g}',
        )


def add_rates(command: ArgumentParser) -> None:
    """Add the rates that a launch line's prediction takes, all optional."""
    for name, text in _NOT_IN_A_LINE.items():
        kind = values.count if name == 'vocab' else values.positive
        command.add_argument(f'--{name}', type=kind, metavar='N', help=text)
    _add_machine(command)


def rates_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rates that `add_rates` added."""
    return {name: options[name] for name in (*_NOT_IN_A_LINE, 'gpus_per_node', *_RATES)}


def _gpus(text: str) -> int:
    values.require(text, values.count(text) <= _MOST_GPUS, f'give at most {_MOST_GPUS} GPUs')
    return int(text)


def _nbytes(text: str) -> float:
    found = values.memory(text)
    values.require(text, isinstance(found, Bytes) and found > 0, 'give bytes such as 80GiB')
    return float(found)


def print_advice(args: Namespace) -> int:
    """Print the best setups; return 0, or 1 where none fits."""
    _require_schedules(args.schedules)
    machine = {name: vars(args)[name] for name in _MACHINE}
    found = _from_line(args, machine) if args.line else _from_shape(args, machine)
    job, own, line_of, notes, band = found
    held = {name: size for name in HELD if (size := getattr(args, f'held_{name}')) is not None}
    with progress('setups', '%', 100) as done:
        advice = advise(job, args.schedules, own, args.count, done, held)
        rival = advice.own
        sizes = {name: size for name, size in held.items() if name != 'chunks'}  # 1f1b has one
        if rival is None and (plain := advise(job, STOCK, count=1, held=sizes).best):
            rival = plain[0]
    if advice.least is not None:
        raise ValueError(_too_little(job, advice))
    if args.json:
        rows = [_row(job, each, rival, line_of, band) for each in advice.best]
        reference = rival and _row(job, rival, rival, line_of, band)
        print_json(
            {
                'gpus': job.gpus,
                'memory': job.memory,
                'possible': advice.possible,
                'simulated': advice.simulated,
                'against': reference,
                'is_own': own is not None,
                'best': rows,
                'notes': notes,
            }
        )
    else:
        _print(job, advice, rival, line_of, notes, band)
    return 0


Lines = Callable[[Job, Setup], list[str]]
_Found = tuple[Job, 'Setup | None', Lines, list[str], tuple[float, float]]


def _from_shape(args: Namespace, machine: dict[str, Any]) -> _Found:
    """Return the job that options tell, without Megatron."""
    if not args.model:
        raise ValueError('give a launch line behind --, or --model and its shape')
    if not args.global_batch_size:
        raise ValueError('--model needs --global-batch-size: give the samples of an iteration')
    if args.layers_file:
        raise ValueError('--layers-file is about a launch line: leave it out, or give the line')
    job = Job(shape_of(vars(args)), args.global_batch_size, cp=args.cp or 1, **machine)
    cp = ['--context-parallel-size', str(job.cp)] if job.cp > 1 else []
    return job, None, lambda job, setup: [*flags_of(job, setup), *cp], [], BY_RATES


def _from_line(args: Namespace, machine: dict[str, Any]) -> _Found:
    """Return the job of a launch line, and its own setup."""
    wrong = [each for each in SIZES if each.name not in (*_NOT_IN_A_LINE, *_SEARCHED)]
    given = [option(each.name) for each in wrong if getattr(args, each.name) is not None]
    given += ['--model'] if args.model else []
    given += ['--global-batch-size'] if args.global_batch_size else []
    given += ['--cp'] if args.cp else []
    if given:
        raise ValueError(f'{given[0]} is in the launch line: leave it out, or the line')
    if args.layers_file and (args.tflops or args.bandwidth):
        raise ValueError('--layers-file has the times: leave --tflops and --bandwidth out')
    if not (args.layers_file or args.tflops):
        raise ValueError(
            'give --tflops, what a matrix product reaches (A100 about 245, H100 about 700 in '
            'bf16), or --layers-file with measured layers'
        )
    from megatron_zbpp.mcore.command_line.doctor import prepare  # takes torch and Megatron

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # Megatron's, about packages that it lacks
        prepare(args.line)
        from megatron_zbpp.mcore.command_line.advise import AdvisedLine

        line = AdvisedLine.of(args.line, args.gpus)
    shape = line.shape(args.tflops or 1.0, args.bandwidth or 0.0, args.vocab)
    job = Job(shape, **line.sizes(args.gpus), **machine)
    own, notes = line.own(job), [*line.unlike(job), *line.checkpoint_notes()]
    if args.layers_file:
        job = with_layers(job, own, load_layers(args.layers_file))

    def line_of(job: Job, setup: Setup) -> list[str]:
        return list(args.line) if setup == own else line.line_of(job, setup)

    return job, own, line_of, notes, BY_TIMES if args.layers_file else BY_RATES


def _require_schedules(names: Sequence[str]) -> None:
    """Raise ValueError for a schedule that no setup can have."""
    for family in map(find, names):
        if family.num_routes > 1 or family.default_slices > 1 or family.asynchronous:
            raise ValueError(
                f'--schedules {family.name}: advice is for whole sequences, one copy of the '
                'weights and a flush: leave it out'
            )


def _too_little(job: Job, advice: Advice) -> str:
    least = advice.least
    assert least is not None
    need = (max(least.nbytes) + job.reserve) / 2**30
    return (
        f'nothing fits {gib(job.memory)} on each of {job.gpus} GPUs: the least is {need:.2f} GiB '
        f'({gib(job.reserve)} of reserve included) with {_words(job, least.setup)}: give '
        f'--memory {int(need) + 1}GiB, or more GPUs'
    )


def _words(job: Job, setup: Setup) -> str:
    experts = f', ep {setup.ep}' if job.shape.experts else ''
    return (
        f'pp {setup.pp}, tp {setup.tp}{experts}, micro batch {setup.micro_batch}, '
        f'{find(setup.schedule).label(setup.chunks)}, recomputation {setup.saving}'
    )


def _row(
    job: Job, made: Prediction, rival: Prediction | None, line_of: Lines, band: tuple[float, float]
) -> dict[str, Any]:
    """Return a setup for JSON."""
    setup = made.setup
    return {
        'schedule': setup.schedule,
        'pp': setup.pp,
        'vpp': setup.chunks,
        'tp': setup.tp,
        'cp': job.cp,
        'ep': setup.ep,
        'dp': job.replicas(setup),
        'micro_batch': setup.micro_batch,
        'microbatches': made.microbatches,
        'recompute': setup.saving,
        'seconds': made.seconds,
        'seconds_from': made.seconds * band[0],
        'seconds_to': made.seconds * band[1],
        'idle_all_ranks': made.idle,
        'gain': gain_of(made.seconds, rival and rival.seconds),
        'bytes': list(made.nbytes),
        'fits': max(made.nbytes) <= job.room,
        'launch_line': shlex.join(line_of(job, setup)),
    }


def _print(
    job: Job,
    advice: Advice,
    rival: Prediction | None,
    line_of: Lines,
    notes: Sequence[str],
    band: tuple[float, float],
) -> None:
    print_wrapped(
        f'{job.gpus} GPUs of {gib(job.memory)}, {job.gpus_per_node} a node: {advice.possible} '
        f'setups, {advice.simulated} simulated'
    )
    named = 'launch line' if advice.own else 'best of stock'
    lines = [(named, rival)] if rival else []
    lines += [(str(k), each) for k, each in enumerate(advice.best, 1)]
    experts = ['ep'] if job.shape.experts else []
    heads = ['', 'schedule', 'pp', 'tp', *experts, 'dp', 'mb', 're', 's/step', 'idle', 'gain']
    print_table([*heads, 'GiB'], [_cells(job, name, each, rival) for name, each in lines])
    print_wrapped(
        'mb: micro batch; re: recomputation; idle: GPU time within the pipeline; gain: time saved '
        f'against the first row; GiB: fullest rank, {gib(job.room)} at most'
    )
    for note in notes:
        print_wrapped(f'note: {note}')
    for k, each in enumerate(advice.best, 1):
        low, high = (f'{each.seconds * share:.4g}' for share in band)
        held = ' '.join(f'{own / 2**30:.1f}' for own in each.nbytes)
        print()
        print_wrapped(
            f'{k}: {each.seconds:.4g} s, probably {low} to {high}; GiB of each pipeline rank: '
            f'{held}'
        )
        print(_pasted(line_of(job, each.setup)))


def _cells(job: Job, name: str, made: Prediction, rival: Prediction | None) -> tuple[object, ...]:
    setup = made.setup
    gain = gain_of(made.seconds, rival and rival.seconds)
    full = '' if max(made.nbytes) <= job.room else '!'
    return (
        name,
        find(setup.schedule).label(setup.chunks),
        *(setup.pp, setup.tp, *([setup.ep] if job.shape.experts else [])),
        *(job.replicas(setup), setup.micro_batch, _LETTERS[setup.saving]),
        *(f'{made.seconds:.4g}', f'{made.idle:.1%}', '-' if gain is None else f'{gain:.1%}'),
        f'{full}{max(made.nbytes) / 2**30:.1f}',
    )


def _pasted(words: Sequence[str]) -> str:
    """Return a command for a shell, in lines of 80 columns."""
    text = textwrap.fill(
        shlex.join(words),
        78,
        initial_indent='  ',
        subsequent_indent='    ',
        break_long_words=False,
        break_on_hyphens=False,
    )
    return text.replace('\n', ' \\\n')
