"""`zbpp advise`: the ten fastest setups of a job that fit, with a launch line of each."""

from __future__ import annotations

import shlex
import textwrap
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_zbpp.analysis.gain import gain_of
from megatron_zbpp.cli import arguments
from megatron_zbpp.cli.arguments import add_options, load_layers
from megatron_zbpp.cli.printing import gib, print_json, print_table, print_wrapped, progress
from megatron_zbpp.cli.profiling import SIZES, add_sizes, option, shape_of
from megatron_zbpp.partitioning.advice import HELD, SCHEDULES, Advice, advise, flags_of, with_layers
from megatron_zbpp.partitioning.setup_costs import JOB_SIZES, STOCK, Job, Setup
from megatron_zbpp.partitioning.setup_prediction import BY_RATES, BY_TIMES, Prediction
from megatron_zbpp.planner.limits import Bytes
from megatron_zbpp.schedules import find

_SEARCHED = ('tp', 'ep', 'dp', 'micro_batch')  # of a shape, what a setup says
RATES = """
    --tflops N  positive  TFLOP/s that a matrix product reaches: for the predicted time of an
        iteration
    --bandwidth N  positive  GB/s of a GPU's memory; default: what is no product takes no time
    --vocab N  count  entries of the vocabulary, where the line does not say: for memory in GiB
"""
_HELD = """
    --pp N  count as held_pp  pipeline-parallel ranks, of all setups; default: the fastest
    --tp N  count as held_tp  tensor-parallel ranks, of all setups; default: the fastest
    --vpp N  count as held_chunks  model chunks of a pipeline rank, of all setups; default: the
        fastest
    --ep N  count as held_ep  expert-parallel ranks, of all setups; default: the fastest
    --micro-batch N  count as held_micro_batch  samples of a microbatch, of all setups; default: the
        fastest
    --cp N  count  with --model: context-parallel ranks
"""
LINKS = f"""
    --gpus-per-node N  count = {JOB_SIZES['gpus_per_node']}  GPUs of a node; default 8
    --within GB/S  positive = {JOB_SIZES['within']}  GB/s that a GPU sends to others of its node, in
        one direction; default {JOB_SIZES['within']:g}
    --between GB/S  positive = {JOB_SIZES['between']}  GB/s that a GPU sends to other nodes; default
        {JOB_SIZES['between']:g}
    --host GB/S  positive = {JOB_SIZES['host']}  GB/s of copies between a GPU and its host; default
        {JOB_SIZES['host']:g}
"""
_NOT_IN_A_LINE = ('tflops', 'bandwidth', 'vocab')
_MOST_GPUS = 16_384
_LETTERS = {'none': '-', 'selective': 'sel', 'full': 'full'}
_OF_LINKS = ('gpus_per_node', 'within', 'between', 'host')
_MACHINE = ('gpus', 'memory', 'reserve', *_OF_LINKS)  # fields of `Job`


def add_advise(command: ArgumentParser) -> None:
    """Add the arguments of `zbpp advise`."""
    add_options(
        command,
        """
        --gpus N  gpus!  of the job
        --memory BYTES  nbytes!  of a GPU, such as 80GiB
        --reserve BYTES  nbytes = 4GiB  of it that the model cannot have: CUDA context, NCCL,
            fragments; default 4GiB
        """,
        gpus=arguments.checked(
            arguments.count, lambda count: count <= _MOST_GPUS, f'give at most {_MOST_GPUS} GPUs'
        ),
        nbytes=arguments.checked(
            arguments.memory,
            lambda amount: isinstance(amount, Bytes) and amount > 0,
            'give bytes such as 80GiB',
        ),
    )
    add_options(
        command,
        _HELD,
        LINKS,
        f"""
        --schedules NAME,...  names = {','.join(SCHEDULES)}  that may run; default
            {','.join(SCHEDULES)}
        --count N  count = 10  of setups; default 10
        --layers-file FILE  path  measured layers of the launch line as it is (zbpp profile --stages
            ... -o FILE), instead of --tflops and --bandwidth
        --global-batch-size N  count  with --model: samples a step
        """,
    )
    add_sizes(command, _SEARCHED)
    add_options(command, 'line -- LAUNCH LINE  text*  torchrun and all')


def rates_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rates among the options."""
    return {name: options[name] for name in (*_NOT_IN_A_LINE, *_OF_LINKS)}


def print_advice(
    line: list[str], schedules: list[str], count: int, as_json: bool, **options: Any
) -> int:
    """Print the best setups; return 0, or 1 where none fits."""
    for family in map(find, schedules):
        if not family.is_plain:
            raise ValueError(
                f'--schedules {family.name}: advice is for whole sequences, one copy of the '
                'weights and a flush: leave it out'
            )
    machine = {name: options[name] for name in _MACHINE}
    request = _from_line(line, options, machine) if line else _from_shape(options, machine)
    job = request.job
    held = {name: size for name in HELD if (size := options[f'held_{name}']) is not None}
    with progress('setups', '%', 100) as done:
        advice = advise(job, schedules, request.own, count, done, held)
        rival = advice.own
        sizes = {name: size for name, size in held.items() if name != 'chunks'}  # 1f1b has one
        if rival is None and (plain := advise(job, STOCK, count=1, held=sizes).best):
            rival = plain[0]
    if (least := advice.least) is not None:
        need, setup = (max(least.nbytes) + job.reserve) / 2**30, least.setup
        experts = f', ep {setup.ep}' if job.shape.experts else ''
        raise ValueError(
            f'nothing fits {gib(job.memory)} on each of {job.gpus} GPUs: the least is {need:.2f} '
            f'GiB ({gib(job.reserve)} of reserve included) with pp {setup.pp}, tp {setup.tp}'
            f'{experts}, micro batch {setup.micro_batch}, '
            f'{find(setup.schedule).label(setup.chunks)}, recomputation {setup.saving}: give '
            f'--memory {int(need) + 1}GiB, or more GPUs'
        )
    if not as_json:
        _print(request, advice, rival)
        return 0
    print_json(
        {
            'gpus': job.gpus,
            'memory': job.memory,
            'possible': advice.possible,
            'simulated': advice.simulated,
            'against': rival and _row(request, rival, rival),
            'is_own': request.own is not None,
            'best': [_row(request, each, rival) for each in advice.best],
            'notes': request.notes,
        }
    )
    return 0


class _Request(NamedTuple):
    """A job that wants advice."""

    job: Job
    own: Setup | None  # of the launch line
    line_of: Callable[[Job, Setup], list[str]]  # returns a launch line
    notes: list[str]
    band: tuple[float, float]  # measured over predicted time, from and to


def _from_shape(options: Mapping[str, Any], machine: dict[str, Any]) -> _Request:
    if not options['model']:
        raise ValueError('give a launch line behind --, or --model and its shape')
    if not options['global_batch_size']:
        raise ValueError('--model needs --global-batch-size: give the samples of an iteration')
    if options['layers_file']:
        raise ValueError('--layers-file is about a launch line: leave it out, or give the line')
    batch, cp = options['global_batch_size'], options['cp'] or 1
    job = Job(shape_of(options), batch, cp=cp, **machine)
    flags = ['--context-parallel-size', str(cp)] if cp > 1 else []
    return _Request(job, None, lambda job, setup: [*flags_of(job, setup), *flags], [], BY_RATES)


def _from_line(words: list[str], options: Mapping[str, Any], machine: dict[str, Any]) -> _Request:
    """Return the job of a launch line, and its own setup."""
    wrong = [each.name for each in SIZES if each.name not in (*_NOT_IN_A_LINE, *_SEARCHED)]
    given = [option(name) for name in wrong if options[name] is not None]
    given += [option(name) for name in ('model', 'global_batch_size', 'cp') if options[name]]
    if given:
        raise ValueError(f'{given[0]} is in the launch line: leave it out, or the line')
    measured, tflops, bandwidth = (options[x] for x in ('layers_file', 'tflops', 'bandwidth'))
    if measured and (tflops or bandwidth):
        raise ValueError('--layers-file has the times: leave --tflops and --bandwidth out')
    if not (measured or tflops):
        raise ValueError(
            'give --tflops, what a matrix product reaches (A100 about 245, H100 about 700 in '
            'bf16), or --layers-file with measured layers'
        )
    from megatron_zbpp.launch.doctor import prepare  # takes torch and Megatron

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # Megatron's, about packages that it lacks
        prepare(words)
        from megatron_zbpp.launch.advise import AdvisedLine

        line = AdvisedLine.of(words, machine['gpus'])
    shape = line.shape(tflops or 1.0, bandwidth or 0.0, options['vocab'])
    job = Job(shape, **line.job_sizes(machine['gpus']), **machine)
    own, notes = line.own(job), [*line.unlike(job), *line.checkpoint_notes()]
    if measured:
        job = with_layers(job, own, load_layers(measured))

    def line_of(job: Job, setup: Setup) -> list[str]:
        return list(words) if setup == own else line.line_of(job, setup)

    return _Request(job, own, line_of, notes, BY_TIMES if measured else BY_RATES)


def _row(request: _Request, made: Prediction, rival: Prediction | None) -> dict[str, Any]:
    job, setup, (low, high) = request.job, made.setup, request.band
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
        'seconds_from': made.seconds * low,
        'seconds_to': made.seconds * high,
        'idle_all_ranks': made.idle,
        'gain': gain_of(made.seconds, rival and rival.seconds),
        'bytes': list(made.nbytes),
        'fits': max(made.nbytes) <= job.room,
        'launch_line': shlex.join(request.line_of(job, setup)),
    }


def _print(request: _Request, advice: Advice, rival: Prediction | None) -> None:
    job = request.job
    print_wrapped(
        f'{job.gpus} GPUs of {gib(job.memory)}, {job.gpus_per_node} a node: {advice.possible} '
        f'setups, {advice.simulated} simulated'
    )
    named = 'launch line' if advice.own else 'best of stock'
    lines = [(named, rival)] if rival else []
    lines += [(str(k), each) for k, each in enumerate(advice.best, 1)]
    rows = [_cells(job, name, each, rival) for name, each in lines]
    print_table([*rows[0]], [[*row.values()] for row in rows])
    print_wrapped(
        'mb: micro batch; re: recomputation; idle: GPU time within the pipeline; gain: time saved '
        f'against the first row; GiB: fullest rank, {gib(job.room)} at most'
    )
    for note in request.notes:
        print_wrapped(f'note: {note}')
    for k, each in enumerate(advice.best, 1):
        low, high = (f'{each.seconds * share:.4g}' for share in request.band)
        held = ' '.join(f'{own / 2**30:.1f}' for own in each.nbytes)
        print()
        print_wrapped(
            f'{k}: {each.seconds:.4g} s, probably {low} to {high}; GiB of each pipeline rank: '
            f'{held}'
        )
        pasted = textwrap.wrap(
            shlex.join(request.line_of(job, each.setup)),
            78,
            initial_indent='  ',
            subsequent_indent='    ',
            break_long_words=False,
            break_on_hyphens=False,
        )
        print(' \\\n'.join(pasted))


def _cells(job: Job, name: str, made: Prediction, rival: Prediction | None) -> dict[str, object]:
    setup = made.setup
    gain = gain_of(made.seconds, rival and rival.seconds)
    full = '' if max(made.nbytes) <= job.room else '!'
    schedule = find(setup.schedule).label(setup.chunks)
    cells: dict[str, object] = {'': name, 'schedule': schedule, 'pp': setup.pp, 'tp': setup.tp}
    cells |= {'ep': setup.ep} if job.shape.experts else {}
    cells |= {'dp': job.replicas(setup), 'mb': setup.micro_batch, 're': _LETTERS[setup.saving]}
    cells |= {'s/step': f'{made.seconds:.4g}', 'idle': f'{made.idle:.1%}'}
    cells |= {'gain': '-' if gain is None else f'{gain:.1%}'}
    return cells | {'GiB': f'{full}{max(made.nbytes) / 2**30:.1f}'}
